"""Admission of requests by tenant: rates, budget, concurrency, then the fair queue.

Rates and budgets are charged with an estimate when a request arrives and corrected when it has ended. Several gateways share a
limit through counters that they send each other with every pong, once a second: what another gateway admitted in the last second
is not yet counted, so a limit can be exceeded by at most a second's requests of each further gateway.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from strata.serving.tenants import cache_salt
from strata.serving.tenants.bucket import Bucket, duration
from strata.serving.tenants.estimate import Estimate
from strata.serving.tenants.queue import Elsewhere, FairQueue, Ticket
from strata.serving.tenants.refusal import LimitReached
from strata.serving.tenants.spending import Spending
from strata.serving.tenants.tenant import BACKGROUND, Caller, Tenant

WAIT_S = 300.0  # longest wait in the queue
LOOK_S = 0.5  # slots also change with replicas and other gateways

# A gateway's counters of a tenant, as sent to other gateways: running sequences, those in flight, requests and tokens since the
# gateway's start, weight.
Counters = tuple[int, int, int, int, float]
Loads = Callable[[], Mapping[str, Mapping[str, Counters]]]  # of other gateways, by their name and tenant
# Running sequences and weights of the tenants in a gateway's queues of further models, by queue and tenant; by gateway.
QueueLoad = Mapping[str, Mapping[str, tuple[int, float]]]
QueueLoads = Callable[[], Mapping[str, QueueLoad]]


class _Meter:
    """Use of one tenant through this gateway."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests, self.tokens = Bucket(clock), Bucket(clock)
        self.total_requests = self.total_tokens = 0
        self.in_flight = 0  # sequences; counted from the check on, before the request has reached the queue


class Entry:
    """An admitted request, from the check of its tenant's limits to its end."""

    def __init__(self, gate: "Gate", caller: Caller, estimate: Estimate, queue: FairQueue) -> None:
        self._gate, self._estimate, self._queue = gate, estimate, queue
        self.caller = caller
        self.waited_s, self.started = 0.0, False
        self._charged, self.settled = estimate.tokens, False
        self.day = gate.spending.today()
        self._queued_as = BACKGROUND if caller.background else caller.tenant
        self._ticket: Ticket | None = None

    async def turn(self) -> None:
        """Returns when the request may run. Raises LimitReached if it was pushed out of the queue or waited too long."""
        loop, queue = asyncio.get_running_loop(), self._queue
        started: asyncio.Future[None] = loop.create_future()
        began = loop.time()

        def start() -> None:
            if not started.done():
                started.set_result(None)

        def drop(error: Exception) -> None:
            if not started.done():
                started.set_exception(error)

        self._ticket = Ticket(self._queued_as, self._estimate.sequences, start, drop)
        queue.submit(self._ticket)
        while not started.done():
            if loop.time() >= began + WAIT_S:
                wait = queue.retry_after(self._queued_as.name, self._estimate.sequences)
                message = f"The request waited {WAIT_S:.0f} s in the queue. Try again in {wait} s."
                raise LimitReached("max_queue", "requests", message, wait)
            await asyncio.wait({started}, timeout=min(LOOK_S, began + WAIT_S - loop.time()))
            queue.dispatch()
        started.result()
        self.waited_s, self.started = loop.time() - began, True

    def settle(self, input: int | None = None, output: int | None = None) -> None:
        """Replaces the estimate by the tokens used; None leaves an estimate as it is."""
        used = (self._estimate.input if input is None else input) + (self._estimate.output if output is None else output)
        self._gate.charge(self.caller.tenant, used - self._charged, self.day)
        self._charged, self.settled = used, True

    def leave(self) -> None:
        if self._ticket is not None:
            self._queue.leave(self._ticket)


class Gate:
    """Limits of tenants over all models, and a fair queue for each model: engines of one do not run the requests of another."""

    def __init__(
        self,
        slots: Callable[[], int],
        max_queue: int,
        secret: bytes,
        lend_idle: Callable[[], bool] = lambda: False,
        others: Loads = dict,
        spending: Spending | None = None,
        clock: Callable[[], float] = time.monotonic,
        other_queues: QueueLoads = dict,
    ) -> None:
        """`slots` and `max_queue` are those of the main model, whose queue is `queue`."""
        self._secret, self._others, self._clock = secret, others, clock
        self._lend_idle, self._other_queues = lend_idle, other_queues
        self.queue = FairQueue(slots, max_queue, clock, lend_idle, self._elsewhere)
        self._queues: dict[str, FairQueue] = {}  # of further models
        self.spending = spending or Spending()
        self._meters: dict[str, _Meter] = {}
        self._counted: dict[str, Mapping[str, Counters]] = {}  # last counters of each other gateway

    def salt(self, tenant: Tenant) -> str | None:
        return cache_salt.salt(self._secret, tenant)

    def open_queue(self, name: str, slots: Callable[[], int], max_queue: int) -> FairQueue:
        """Adds the queue of a further model."""
        self._queues[name] = FairQueue(slots, max_queue, self._clock, self._lend_idle, lambda: self._elsewhere_in(name))
        return self._queues[name]

    def close_queue(self, name: str) -> None:
        self._queues.pop(name, None)

    @contextmanager
    def entered(self, caller: Caller, estimate: Estimate, queue: FairQueue | None = None) -> Iterator[Entry]:
        """Checks the tenant's limits and charges the estimate. Raises LimitReached. A request that is not settled costs no
        tokens. `queue`: of its model; by default that of the main model."""
        queue = queue or self.queue
        self._absorb()
        self._check(caller.tenant, estimate, queue)
        self._count_request(caller.tenant)
        entry, meter = Entry(self, caller, estimate, queue), self._meter(caller.tenant.name)
        self.charge(caller.tenant, estimate.tokens, entry.day)
        meter.in_flight += estimate.sequences
        if caller.background:
            self._meter(BACKGROUND.name)  # sent to other gateways with the tenants'
        try:
            yield entry
        finally:
            meter.in_flight -= estimate.sequences
            if not entry.settled:
                entry.settle(0, 0)
            entry.leave()

    def count(self, caller: Caller) -> None:
        """Charges a request that runs no sequence. Raises LimitReached."""
        self._absorb()
        self._check_requests(caller.tenant)
        self._count_request(caller.tenant)

    def charge(self, tenant: Tenant, tokens: int, day: int) -> None:
        meter = self._meter(tenant.name)
        meter.total_tokens += tokens
        if (limit := tenant.limits.tokens_per_minute) is not None:
            meter.tokens.add(tokens, limit)
        self.spending.add(tenant.name, tokens, day)

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """Limits and what is left of them, as OpenAI's API names them."""
        limits, meter = tenant.limits, self._meter(tenant.name)
        found: dict[str, str] = {}
        buckets = (("requests", limits.requests_per_minute, meter.requests), ("tokens", limits.tokens_per_minute, meter.tokens))
        for name, limit, bucket in buckets:
            if limit is not None:
                found |= _three(name, limit, bucket.left(limit), duration(bucket.reset_s(limit)))
        if limits.tokens_per_day is not None:
            left = max(0, limits.tokens_per_day - self.spending.spent(tenant.name))
            found |= _three("tokens-day", limits.tokens_per_day, left, duration(self.spending.until_tomorrow_s()))
        if limits.concurrency is not None:
            left = max(0, limits.concurrency - self._in_flight(tenant.name))
            found |= _three("concurrency", limits.concurrency, left, duration(self.queue.retry_after(tenant.name, 1)))
        return found

    def load(self) -> dict[str, Any]:
        """Counters for the other gateways, of the tenants with any requests here."""
        active = {tenant.name: tenant.limits.weight for tenant in self.queue.active()}
        return {
            name: (self.queue.running(name), meter.in_flight, meter.total_requests, meter.total_tokens, active.get(name, 0.0))
            for name, meter in self._meters.items()
        }

    def queue_load(self) -> dict[str, dict[str, tuple[int, float]]]:
        """Counters of the queues of further models, for the other gateways."""
        return {
            name: {tenant.name: (queue.running(tenant.name), tenant.limits.weight) for tenant in queue.active()}
            for name, queue in self._queues.items()
        }

    def _meter(self, name: str) -> _Meter:
        if name not in self._meters:
            self._meters[name] = _Meter(self._clock)
        return self._meters[name]

    def _check(self, tenant: Tenant, estimate: Estimate, queue: FairQueue) -> None:
        limits, meter = tenant.limits, self._meter(tenant.name)
        self._check_requests(tenant)
        if (limit := limits.tokens_per_minute) is not None and (wait := meter.tokens.wait_s(estimate.tokens, limit)) > 0:
            state = f"Limit {limit}, left {meter.tokens.left(limit)}, requested {estimate.tokens}."
            raise _reached("tokens_per_minute", "tokens per minute", "tokens", state, wait)
        if (limit := limits.tokens_per_day) is not None and (spent := self.spending.spent(tenant.name)) + estimate.tokens > limit:
            wait = self.spending.until_tomorrow_s() if estimate.tokens <= limit else math.inf
            state = f"Limit {limit}, used {max(0, spent)}, requested {estimate.tokens}."
            raise _reached("tokens_per_day", "tokens per UTC day", "insufficient_quota", state, wait)
        in_flight = self._in_flight(tenant.name)
        if (limit := limits.concurrency) is not None and in_flight + estimate.sequences > limit:
            excess = in_flight + estimate.sequences - limit
            wait = queue.retry_after(tenant.name, excess) if estimate.sequences <= limit else math.inf
            state = f"Limit {limit}, in flight {in_flight}, requested {estimate.sequences}."
            raise _reached("concurrency", "concurrent sequences", "requests", state, wait)

    def _check_requests(self, tenant: Tenant) -> None:
        meter, limit = self._meter(tenant.name), tenant.limits.requests_per_minute
        if limit is not None and (wait := meter.requests.wait_s(1, limit)) > 0:
            raise _reached("requests_per_minute", "requests per minute", "requests", f"Limit {limit}.", wait)

    def _count_request(self, tenant: Tenant) -> None:
        meter = self._meter(tenant.name)
        meter.total_requests += 1
        if (limit := tenant.limits.requests_per_minute) is not None:
            meter.requests.add(1, limit)

    def _in_flight(self, tenant: str) -> int:
        return self._meter(tenant).in_flight + sum(each[tenant][1] for each in self._others().values() if tenant in each)

    def _elsewhere(self) -> dict[str, Elsewhere]:
        found: dict[str, Elsewhere] = {}
        for tenants in self._others().values():
            for name, (running, in_flight, _, _, weight) in tenants.items():
                if weight:
                    before = found.get(name, Elsewhere())
                    found[name] = Elsewhere(before.running + running, before.in_flight + in_flight, weight)
        return found

    def _elsewhere_in(self, queue: str) -> dict[str, Elsewhere]:
        found: dict[str, Elsewhere] = {}
        for queues in self._other_queues().values():
            for name, (running, weight) in queues.get(queue, {}).items():
                found[name] = Elsewhere(found.get(name, Elsewhere()).running + running, 0, weight)
        return found

    def _absorb(self) -> None:
        """Adds what other gateways admitted since the last look to the buckets. The first counters of a gateway only set the
        mark: they are sums since its start."""
        others = self._others()
        for gateway, tenants in others.items():
            counted = self._counted.get(gateway, tenants)
            for name, (_, _, requests, tokens, _) in tenants.items() if counted is not tenants else ():
                before = counted.get(name, (0, 0, 0, 0, 0.0))
                meter = self._meter(name)
                meter.requests.add_elsewhere(requests - before[2])
                meter.tokens.add_elsewhere(tokens - before[3])
        self._counted = dict(others)


def _three(name: str, limit: int, left: int, reset: str) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(limit),
        f"x-ratelimit-remaining-{name}": str(left),
        f"x-ratelimit-reset-{name}": reset,
    }


def _reached(limit: str, words: str, kind: Any, state: str, wait: float) -> LimitReached:
    if wait == math.inf:
        return LimitReached(limit, kind, f"The request is larger than the limit on {words}. {state}", None)
    retry = max(1, math.ceil(wait))
    return LimitReached(limit, kind, f"Rate limit reached on {words}. {state} Try again in {retry} s.", retry)
