"""Lookup of a name, with suggestions for unknown names."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from strata.platform.errors import UserError, shown

T = TypeVar("T")


def choose(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
    raise UserError(f"There is no {kind} '{shown(name)}'.", f"Did you mean {' or '.join(near)}?")
