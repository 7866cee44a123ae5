"""State of an endpoint for `GET /-/state`: replicas with their load and queue, and running totals of its gateways.

It has sums over all clients only, nothing of one request, client or key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from strata.serving.transport.peers import Peer, Peers

ROUTE = "/-/state"
LOADS = ("running", "waiting", "kv_usage", "queued_tokens")  # of an engine, as far as its kind reports them


def state(
    kind: str,
    models: Sequence[str],
    replicas: Sequence[tuple[str, str, Peers]],
    own: Mapping[str, float],
    other_gateways: Sequence[Peer],
) -> dict[str, Any]:
    """`replicas`: model, role and peers of each pool. `own`: totals of this gateway; those of the others are as of their last
    pong, about a second ago."""
    others = [gateway.link.load for gateway in other_gateways]
    return {
        "object": "state",
        "kind": kind,
        "models": list(models),
        "replicas": [_replica(model, role, peer) for model, role, pool in replicas for peer in _sorted(pool)],
        "gateways": 1 + len(others),
        "totals": {name: value + sum(load.get(name, 0) for load in others) for name, value in own.items()},
    }


def _sorted(pool: Peers) -> list[Peer]:
    return sorted(pool.all(), key=lambda peer: peer.name)


def _replica(model: str, role: str, peer: Peer) -> dict[str, Any]:
    load = peer.link.load
    known = {name: load[name] for name in LOADS if name in load}
    return {"name": peer.name, "model": model, "role": role, "healthy": peer.healthy, "calls": peer.busy} | known
