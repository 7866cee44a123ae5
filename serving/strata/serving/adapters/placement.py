"""Expected time until a replica can compute with an adapter."""

from collections.abc import Mapping
from typing import Any


def load_s(adapter: str | None, reported: Mapping[str, Any]) -> float:
    """Seconds to load an adapter, by its engine name, on a replica with the `reported` load; 0 where it is loaded."""
    if adapter is None or adapter in reported.get("adapters", ()):
        return 0.0
    return float(reported.get("adapter_load_s", 0.0))
