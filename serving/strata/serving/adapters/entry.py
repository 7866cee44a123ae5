"""An adapter of a served model, and its record in the directory."""

import re
from dataclasses import asdict, dataclass
from typing import Any

# '@' separates the revision. Names are labels, parts of paths and header values, so they have no other signs.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
ROLE = "adapter"  # in the directory


@dataclass(frozen=True)
class Entry:
    name: str  # that requests give as `model`
    folder: str  # in peft's format
    revision: str  # digest of the folder's content
    rank: int
    added: float = 0.0  # Unix time

    @property
    def engine_name(self) -> str:
        """Name in engines. KV blocks are named by it, so those of other weights under the same public name are never read."""
        return f"{self.name}@{self.revision}"

    def tree(self) -> dict[str, Any]:
        """For the directory, and for calls."""
        return asdict(self)


def store(model: str) -> str:
    """Name of the directory with a model's adapters. It is apart from the endpoint's own, which a new start clears."""
    return f"{model}.adapters"
