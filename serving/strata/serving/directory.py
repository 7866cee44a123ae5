"""Where the replicas of an endpoint listen, in the key-value store of Ray's head.

Serve places, starts and restarts replicas but has no way for them to find each other's sockets. Ray's own store is shared by
the cluster and survives what the head survives; no process of ours has to stay alive for it.
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

    async def entries(self, role: str) -> dict[str, dict[str, Any]]:
        prefix = self._key(role, "")
        found = await asyncio.to_thread(_list, prefix)
        return {key.removeprefix(prefix).decode(): json.loads(value) for key, value in found.items()}

    def clear(self) -> None:
        """What an endpoint that was killed left behind."""
        for key in _list(self._prefix.encode()):
            _delete(key)


def _put(key: bytes, value: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, namespace=NAMESPACE)


def _delete(key: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=NAMESPACE)


def _list(prefix: bytes) -> dict[bytes, bytes]:
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    keys = _internal_kv_list(prefix, namespace=NAMESPACE)
    values = {key: _internal_kv_get(key, namespace=NAMESPACE) for key in keys}
    return {key: value for key, value in values.items() if value is not None}
