"""Directory of replica addresses, in the key-value store of Ray's GCS.

Serve places, starts and restarts replicas but offers no way to find each other's sockets. The GCS store is shared by the
cluster, lives as long as the head, and needs no additional process.
"""

import asyncio
import json
from typing import Any

NAMESPACE = b"strata"


class Directory:
    def __init__(self, endpoint: str) -> None:
        self._prefix = f"serve/{endpoint}/"

    def _key(self, role: str, name: str) -> bytes:
        return f"{self._prefix}{role}/{name}".encode()

    async def publish(self, role: str, name: str, entry: dict[str, Any]) -> None:
        await asyncio.to_thread(_put, self._key(role, name), json.dumps(entry).encode())

    async def withdraw(self, role: str, name: str) -> None:
        await asyncio.to_thread(_delete, self._key(role, name))

    async def names(self, role: str) -> set[str]:
        """Names of the published replicas. Polled, so it is a single request to the head."""
        prefix = self._key(role, "")
        return {key.removeprefix(prefix).decode() for key in await asyncio.to_thread(_list, prefix)}

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        found = await asyncio.to_thread(_get, self._key(role, name))
        return None if found is None else dict(json.loads(found))

    def entries(self, role: str) -> list[dict[str, Any]]:
        """All entries of a role. Blocks on the head."""
        found = [_get(key) for key in _list(self._key(role, ""))]
        return [dict(json.loads(entry)) for entry in found if entry is not None]

    def clear(self) -> None:
        """Deletes the entries of a previous endpoint that was killed."""
        for key in _list(self._prefix.encode()):
            _delete(key)


def _put(key: bytes, value: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, namespace=NAMESPACE)


def _delete(key: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=NAMESPACE)


def _get(key: bytes) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return found


def _list(prefix: bytes) -> list[bytes]:
    from ray.experimental.internal_kv import _internal_kv_list

    return list(_internal_kv_list(prefix, namespace=NAMESPACE))
