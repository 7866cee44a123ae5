"""Session-wide cache of kustomize builds."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from strata.deploy import render


@pytest.fixture(scope="session", autouse=True)
def cached_builds() -> Iterator[None]:
    """Caches builds, which take up to a second each. Tests must not modify the result; `fill` copies it."""
    with pytest.MonkeyPatch.context() as patch:
        cached: Any = functools.cache(render.build)
        patch.setattr(render, "build", cached)
        yield
