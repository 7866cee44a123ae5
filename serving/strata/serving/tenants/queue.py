"""Weighted fair queue over the sequences that an endpoint's engines run at once.

A sequence in an engine's batch slows all others of the batch, so the shared resource is the number of running sequences. While
several tenants are active, each may run its share of them: `slots * weight / (weights of all active tenants)`, rounded down. A
tenant is active while it has a request, and for `ACTIVE_S` after. What one of them does not use stays free, so that a flood
changes neither the batch nor the queue of the others; with `lend_idle`, others may use it. A single active tenant has all slots.
Lines of batches come after all tenants and have one slot while any is active.

Requests that cannot start wait here. The next one to start is that of the highest priority, then of the tenant that runs the
fewest sequences relative to its weight, then of the one that has waited longest in virtual time. A full queue drops the newest
request of the tenant with the longest queue relative to its weight.

Synchronous, with a clock from outside: the gateway and the simulation run the same code.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from strata.serving.api.requests import ApiError
from strata.serving.tenants.completions import Completions
from strata.serving.tenants.refusal import LimitReached
from strata.serving.tenants.tenant import BACKGROUND, Tenant

ACTIVE_S = 60.0


class Elsewhere(NamedTuple):
    """A tenant's use of other gateways."""

    running: int = 0
    in_flight: int = 0
    weight: float = 1.0


class Ticket:
    """A request in the queue or on the engines. `start` is called when it may run, `drop` when it was pushed out."""

    def __init__(self, tenant: Tenant, sequences: int, start: Callable[[], None], drop: Callable[[ApiError], None]) -> None:
        self.tenant, self.sequences, self.start, self.drop = tenant, sequences, start, drop
        self.waiting = self.running = False


class _Lane:
    """Requests of one tenant."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float]) -> None:
        self.tenant = tenant
        self.waiting: deque[Ticket] = deque()
        self.queued = self.running = 0  # sequences
        self.tag = 0.0  # virtual time at which its next request may start
        self.seen = 0.0
        self.completions = Completions(clock)

    @property
    def weight(self) -> float:
        return self.tenant.limits.weight

    @property
    def in_flight(self) -> int:
        return self.queued + self.running


class FairQueue:
    def __init__(
        self,
        slots: Callable[[], int],
        max_queue: int,
        clock: Callable[[], float],
        lend_idle: Callable[[], bool] = lambda: False,
        elsewhere: Callable[[], Mapping[str, Elsewhere]] = dict,
    ) -> None:
        """`slots` returns the sequences that the endpoint's engines run at once. `max_queue` bounds the waiting sequences of this
        gateway. `elsewhere` returns the tenants' use of other gateways."""
        self._slots, self._max_queue, self._clock = slots, max_queue, clock
        self._lend_idle, self._elsewhere = lend_idle, elsewhere
        self._lanes: dict[str, _Lane] = {}
        self._queued = self._running = 0
        self._virtual = 0.0

    def in_flight(self, tenant: str) -> int:
        """Sequences of a tenant that run or wait."""
        return self._lanes[tenant].in_flight if tenant in self._lanes else 0

    def running(self, tenant: str) -> int:
        return self._lanes[tenant].running if tenant in self._lanes else 0

    def active(self) -> Iterator[Tenant]:
        return (lane.tenant for lane in self._active())

    def retry_after(self, tenant: str, excess: int) -> int:
        """Seconds until `excess` of the tenant's sequences have ended."""
        lane = self._lanes.get(tenant)
        return lane.completions.retry_after(excess, lane.in_flight) if lane is not None else 1

    def submit(self, ticket: Ticket) -> None:
        """Starts a request, or queues it. Raises LimitReached if the queue is full."""
        name = ticket.tenant.name
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(ticket.tenant, self._clock)
        lane.tenant, lane.seen = ticket.tenant, self._clock()
        if not lane.in_flight:
            lane.completions.busy()
            lane.tag = max(lane.tag, self._virtual)
        lane.waiting.append(ticket)
        lane.queued += ticket.sequences
        self._queued += ticket.sequences
        ticket.waiting = True
        self.dispatch()
        refused = None
        while self._queued > self._max_queue:
            longest = max(
                (each for each in self._lanes.values() if each.waiting),
                key=lambda each: (-each.tenant.limits.priority, each.queued / each.weight, each is lane),
            )
            last = longest.waiting[-1]
            error = self._full(longest, last.sequences)
            self._unqueue(last)
            if last is ticket:
                refused = error
            else:
                last.drop(error)
        if refused is not None:
            raise refused

    def leave(self, ticket: Ticket) -> None:
        """Ends a running request, or withdraws a waiting one."""
        lane = self._lanes[ticket.tenant.name] if ticket.waiting or ticket.running else None
        if lane is None:
            return
        lane.seen = self._clock()
        if ticket.running:
            ticket.running = False
            lane.running -= ticket.sequences
            self._running -= ticket.sequences
            lane.completions.ended(ticket.sequences)
        else:
            self._unqueue(ticket)
        self.dispatch()

    def dispatch(self) -> None:
        """Starts every request that may start now. Called after every change of what the queue depends on."""
        if not self._queued:
            return
        elsewhere, slots = self._elsewhere(), self._slots()
        weights = self._weights(elsewhere)
        free = slots - self._running - sum(use.running for use in elsewhere.values())
        while (ticket := self._next(slots, free, weights, elsewhere)) is not None:
            lane = self._lanes[ticket.tenant.name]
            self._unqueue(ticket)
            self._virtual = max(self._virtual, lane.tag)
            lane.tag = max(lane.tag, self._virtual) + ticket.sequences / lane.weight
            lane.running += ticket.sequences
            self._running += ticket.sequences
            free -= ticket.sequences
            ticket.running = True
            ticket.start()

    def share(self, tenant: str) -> int:
        """Sequences that an active tenant may run at present."""
        return self._share(self._lanes[tenant], self._slots(), self._weights(self._elsewhere()))

    def _next(self, slots: int, free: int, weights: float, elsewhere: Mapping[str, Elsewhere]) -> Ticket | None:
        nowhere = Elsewhere()
        order = []
        for name, lane in self._lanes.items():
            if lane.waiting:
                used = lane.running + elsewhere.get(name, nowhere).running
                order.append((-lane.tenant.limits.priority, used / lane.weight, lane.tag, name, used))
        for _, _, _, name, used in sorted(order):
            lane = self._lanes[name]
            ticket, share = lane.waiting[0], self._share(lane, slots, weights)
            if ticket.sequences <= share:
                if used + ticket.sequences > share:
                    continue
                if ticket.sequences > free:
                    return None  # it is next: smaller requests of others must not overtake it for ever
                return ticket
            # Larger than the share: it starts while nobody needs the slots, and delays nobody while it waits.
            if not used and min(ticket.sequences, slots) <= free:
                return ticket
        return None

    def _share(self, lane: _Lane, slots: int, weights: float) -> int:
        if self._lend_idle() or lane.weight >= weights:
            return slots
        if lane.tenant is BACKGROUND:
            return 1
        return max(1, int(slots * lane.weight / weights))

    def _weights(self, elsewhere: Mapping[str, Elsewhere]) -> float:
        """Sum of the weights of all active tenants."""
        here = {lane.tenant.name: lane.weight for lane in self._active() if lane.tenant is not BACKGROUND}
        others = (use.weight for name, use in elsewhere.items() if name not in here and name != BACKGROUND.name)
        return sum(here.values()) + sum(others)

    def _active(self) -> list[_Lane]:
        oldest = self._clock() - ACTIVE_S
        for name in [name for name, lane in self._lanes.items() if not lane.in_flight and lane.seen < oldest]:
            del self._lanes[name]
        return list(self._lanes.values())

    def _unqueue(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.tenant.name]
        if lane.waiting[0] is ticket:
            lane.waiting.popleft()
        elif lane.waiting[-1] is ticket:
            lane.waiting.pop()
        else:
            lane.waiting.remove(ticket)
        ticket.waiting = False
        lane.queued -= ticket.sequences
        self._queued -= ticket.sequences

    def _full(self, lane: _Lane, sequences: int) -> LimitReached:
        wait = lane.completions.retry_after(sequences, lane.in_flight)
        message = f"The queue is full; {lane.queued} sequences of '{lane.tenant.name}' wait. Try again in {wait} s."
        return LimitReached("max_queue", "requests", message, wait)
