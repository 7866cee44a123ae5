"""Replicas of a simulation that come and go: starts that take time, drains, and decisions by a scaler every few seconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from strata.serving.scaling.demand import Seen
from strata.serving.simulation.replica import Replica, Role

LOOK_S = 2.0
DRAIN_S = 30.0  # streams that have not ended by then continue on another replica


@dataclass(frozen=True)
class Pool:
    """A pool as a scaler sees it."""

    running: int
    target: int
    ongoing: int  # requests on its replicas or waiting for one
    waiting: int  # of these, without a place on an engine


class Scaler(Protocol):
    def decide(self, seen: Seen, pools: Mapping[Role, Pool]) -> Mapping[Role, int]:
        """Replicas to have in each pool."""
        ...


@dataclass(frozen=True)
class Scaling:
    """Autoscaling of an endpoint. `scaler` makes a scaler for one run."""

    scaler: Callable[[], Scaler]
    startup_s: float


class Endpoint(Protocol):
    """The simulation as the fleet acts on it."""

    @property
    def replicas(self) -> Mapping[Role, list[Replica]]: ...

    def call_at(self, at: float, handle: Callable[[], None]) -> None: ...

    def add(self, role: Role) -> None: ...

    def withdraw(self, replica: Replica) -> None:
        """Sends no new request to a replica."""

    def remove(self, replica: Replica) -> None:
        """Ends a replica; what it still does is done by others."""

    def idles(self) -> bool:
        """No request is in flight, and none will arrive."""
        ...

    def seen(self) -> Seen: ...

    def waiting_for_a_replica(self) -> int: ...


class Fleet:
    def __init__(self, scaling: Scaling, endpoint: Endpoint) -> None:
        self._scaler, self._startup_s, self._endpoint = scaling.scaler(), scaling.startup_s, endpoint
        self._starting: dict[Role, list[_Start]] = {role: [] for role in endpoint.replicas}
        self._draining: dict[Replica, float] = {}  # with their deadlines
        self.start_s = dict.fromkeys(endpoint.replicas, 0.0)  # seconds that replicas took to start
        self.peak = {role: len(replicas) for role, replicas in endpoint.replicas.items()}
        self._now = 0.0
        endpoint.call_at(LOOK_S, self._look)

    def _look(self) -> None:
        seen = self._endpoint.seen()
        self._now = seen.at
        for replica, deadline in list(self._draining.items()):
            if not replica.in_use or self._now >= deadline:
                del self._draining[replica]
                self._endpoint.remove(replica)
        pools = {role: self._pool(role) for role, replicas in self._endpoint.replicas.items() if replicas or role == "decode"}
        for role, number in self._scaler.decide(seen, pools).items():
            self._resize(role, number)
        if self._endpoint.idles():
            for role in self._starting:
                self._cancel(role, len(self._starting[role]))
            for replica in self._draining:
                self._endpoint.remove(replica)
        else:
            self._endpoint.call_at(self._now + LOOK_S, self._look)

    def _pool(self, role: Role) -> Pool:
        replicas = self._endpoint.replicas[role]
        stranded = self._endpoint.waiting_for_a_replica() if role == "decode" else 0
        ongoing = sum(replica.busy for replica in replicas) + stranded
        waiting = sum(replica.waiting for replica in replicas) + stranded
        return Pool(len(replicas), len(replicas) + len(self._starting[role]), ongoing, waiting)

    def _resize(self, role: Role, number: int) -> None:
        replicas, starting = self._endpoint.replicas[role], self._starting[role]
        more = number - len(replicas) - len(starting)
        for _ in range(more):
            start = _Start(self._now)
            starting.append(start)
            self._endpoint.call_at(self._now + self._startup_s, partial(self._started, role, start))
        cancelled = self._cancel(role, min(-more, len(starting))) if more < 0 else 0
        for replica in sorted(replicas, key=lambda each: each.busy)[: max(0, -more - cancelled)]:
            self._endpoint.withdraw(replica)
            self._draining[replica] = self._now + DRAIN_S
        self.peak[role] = max(self.peak[role], number)

    def _cancel(self, role: Role, count: int) -> int:
        """Cancels the youngest starts."""
        for _ in range(count):
            self.start_s[role] += self._now - self._starting[role].pop().began
        return count

    def _started(self, role: Role, start: "_Start") -> None:
        if start in self._starting[role]:  # else it was cancelled
            self._starting[role].remove(start)
            self.start_s[role] += self._startup_s
            self._endpoint.add(role)


@dataclass(eq=False)
class _Start:
    began: float
