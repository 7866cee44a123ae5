"""Ray's key-value store in memory, for tests of what gateways and replicas write to it."""

import pytest

from strata.serving.transport import directory


def replace(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Replaces the store. Returns its entries."""
    found: dict[bytes, bytes] = {}
    monkeypatch.setattr(directory, "_put", found.__setitem__)
    monkeypatch.setattr(directory, "_delete", lambda key: found.pop(key, None))
    monkeypatch.setattr(directory, "_get", found.get)
    monkeypatch.setattr(directory, "_list", lambda prefix: [key for key in found if key.startswith(prefix)])
    return found
