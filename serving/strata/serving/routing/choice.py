"""Choice of the replica for a request. Pure functions: gateways, decode replicas and the simulation call them."""

import random
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)
Pick = Callable[[Sequence[R]], R]  # one of several that are equally good


def least_busy(
    replicas: Sequence[R], cost: Callable[[R], float], without: Collection[str] = (), pick: Pick[R] = random.choice
) -> R | None:
    """Replica with the lowest cost that is not in `without`; one that is, if there are no others. `pick` breaks ties."""
    usable = ([replica for replica in replicas if replica.name not in without] or replicas) if without else replicas
    if not usable:
        return None
    costs = [cost(replica) for replica in usable]
    least = min(costs)
    ties = [replica for replica, each in zip(usable, costs, strict=True) if each == least]
    return ties[0] if len(ties) == 1 else pick(ties)


def decode_or_standby(decode: R | None, standby: Callable[[], R | None], without: Collection[str]) -> R | None:
    """The chosen decode replica, or a prefill replica while no untried decode replica is up."""
    if decode is not None and decode.name not in without:
        return decode
    other = standby()
    return decode if other is None or (decode is not None and other.name in without) else other
