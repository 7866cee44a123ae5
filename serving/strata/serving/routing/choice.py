"""Choice of the replica for a request. Pure functions: gateways, decode replicas and the simulation call them."""

import random
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)
Pick = Callable[[Sequence[int]], int]  # one of several numbers


def least_busy(
    replicas: Sequence[R], cost: Callable[[R], float], without: Collection[str] = (), pick: Pick = random.choice
) -> R | None:
    """Replica with the lowest cost that is not in `without`; one that is, if there are no others. `pick` breaks ties."""
    usable = untried(replicas, without)
    return usable[place_of_least(list(map(cost, usable)), pick)] if usable else None


def untried(replicas: Sequence[R], without: Collection[str]) -> Sequence[R]:
    """Replicas that are not in `without`; all, if there are no others."""
    return ([replica for replica in replicas if replica.name not in without] or replicas) if without else replicas


def place_of_least(costs: Sequence[float], pick: Pick) -> int:
    """Index of the lowest cost. `pick` breaks ties."""
    least = min(costs)
    place = costs.index(least)
    if (ties := costs.count(least)) > 1:
        for _ in range(pick(range(ties))):
            place = costs.index(least, place + 1)
    return place


def decode_or_standby(decode: R | None, standby: Callable[[], R | None], without: Collection[str]) -> R | None:
    """The chosen decode replica, or a prefill replica while no untried decode replica is up."""
    if decode is not None and decode.name not in without:
        return decode
    other = standby()
    return decode if other is None or (decode is not None and other.name in without) else other
