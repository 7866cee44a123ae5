"""Simulation of an endpoint: one gateway, decode replicas and prefill replicas, driven by a heap of events.

Decisions are those of production, by the same code: `gateway.admission` admits, or `tenants.queue` where there are tenants,
`routing.choice` chooses replicas, `routing.policy` places prefills with the rates that `engine.pool_load` measures. What happens
to a request whose replica dies follows `gateway.relay` and `engine.disaggregation`, with their limits.

Not simulated: several gateways with different knowledge, contention of KV transfers, and clients that retry or disconnect.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from strata.serving.api.requests import ApiError
from strata.serving.gateway import admission
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.relay import REPLICA_WAIT_S, TRIES
from strata.serving.routing import choice, policy
from strata.serving.routing.kv.expected_wait import LEAST_BUSY
from strata.serving.routing.policy import Decision, Rule
from strata.serving.scaling.demand import Seen
from strata.serving.scaling.sizing import Slo
from strata.serving.simulation.engine import Engine, EngineSettings, Times
from strata.serving.simulation.front_end import FrontEnd, Parsing
from strata.serving.simulation.replica import Flight, Replica, Role
from strata.serving.simulation.requests import Request
from strata.serving.simulation.results import PoolUse, Results, TenantResults
from strata.serving.simulation.routing.chooser import Chooser, Routing
from strata.serving.simulation.scaling.fleet import Fleet, Scaling
from strata.serving.simulation.sequence import Sequence
from strata.serving.spec import LEASE_S
from strata.serving.tenants.queue import FairQueue, Ticket
from strata.serving.tenants.tenant import Tenant

_busy: Callable[[Replica], float] = attrgetter("busy")
LOCAL = Decision("local", "no-prefill-engine")
STANDBY = Decision("local", policy.ON_STANDBY)
PREFILL_FAILED = Decision("local", "prefill-failed")
PROGRESS_EVENTS = 10_000


@dataclass(frozen=True)
class Kill:
    at: float  # seconds
    role: Role
    index: int


@dataclass(frozen=True)
class Setup:
    """An endpoint. `prefill_engine` is read only where there are prefill replicas."""

    times: Times
    decode_replicas: int
    decode_engine: EngineSettings
    max_queue: int
    context: int  # most tokens of a prompt with its answer
    request_s: float  # median of HTTP, tokenizer and the stream's first chunk
    request_spread: float = 0.0  # standard deviation of its logarithm
    front_request_s: float = 0.0  # work of a replica's front end for each request, and for each token
    front_token_s: float = 0.0
    prefill_replicas: int = 0
    prefill_engine: EngineSettings | None = None
    rule: Rule = field(default_factory=lambda: Rule("cheaper", 256, 2.0, 0.25))
    handoff_s: float = 0.0
    transfer_token_s: float = 0.0
    kills: Several[Kill] = ()
    recovery_s: float = 60.0  # until a killed replica is replaced
    scaling: Scaling | None = None
    slo: Slo | None = None
    tenants: Mapping[str, Tenant] = field(default_factory=dict)  # by name; none: first come, first served
    routing: Routing = "least-busy"


class Simulation:
    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self._setup = setup
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[Any, Any], None], Any, Any]] = []
        self._order = 0
        self.now = 0.0
        self.results = Results(setup.slo)
        self.pools: dict[Role, list[Replica]] = {"decode": [], "prefill": []}
        self._stranded: dict[Flight, None] = {}  # no replica is up
        self._in_flight = self._to_arrive = 0
        settings, configured = setup.decode_engine, max(1, setup.decode_replicas)  # a pool at zero is being brought back
        self._admission = Admission(
            lambda: admission.capacity(len(self.pools["decode"]), configured, settings.max_sequences, setup.max_queue),
            lambda: self.now,
        )
        self._fair = FairQueue(
            lambda: admission.capacity(len(self.pools["decode"]), configured, settings.max_sequences, 0),
            setup.max_queue,
            lambda: self.now,
        )
        self.results.tenants = {name: TenantResults() for name in setup.tenants}
        self._chooser = None
        if setup.routing != "least-busy":
            oracle = setup.routing == "oracle"
            self._chooser = Chooser(oracle, settings, self._random.choice, lambda: self.now)
        fits = [settings] + ([setup.prefill_engine] if setup.prefill_engine and setup.prefill_replicas else [])
        self._longest = min(setup.context, *(each.blocks * each.block_size for each in fits))
        for role, count in (("decode", setup.decode_replicas), ("prefill", setup.prefill_replicas)):
            self.results.pools[role] = PoolUse()
            for index in range(count):
                self._join(role, f"{role}-{index}")  # type: ignore[arg-type]
        for kill in setup.kills:
            self._at(kill.at, self._kill, kill, None)
        self._fleet = Fleet(setup.scaling, self) if setup.scaling is not None else None

    def run(self, arrivals: Iterable[tuple[float, Request]], progress: Callable[[int], None] | None = None) -> Results:
        """Runs until every request has ended. `arrivals` are (seconds, request) in order of time. `progress` is called with the
        number of ended requests now and then."""
        self._arrivals = iter(arrivals)
        self._next_arrival()
        events, results = self._events, self.results
        while events:
            self.now, _, handle, first, second = heapq.heappop(events)
            results.events += 1
            handle(first, second)
            if progress is not None and not results.events % PROGRESS_EVENTS:
                progress(results.ended)
        assert not self._in_flight, "requests were lost"
        for role, replicas in self.pools.items():
            for replica in replicas:
                self._account(role, replica, max(results.ended_at, replica.up_since))
            if self._fleet is not None:
                results.pools[role].start_s = self._fleet.start_s[role]
                results.pools[role].replicas = self._fleet.peak[role]
        return results

    def _at(self, at: float, handle: Callable[[Any, Any], None], first: Any, second: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, handle, first, second))

    def _next_arrival(self) -> None:
        if (arrival := next(self._arrivals, None)) is not None:
            self._to_arrive += 1
            self._at(arrival[0], self._arrive, arrival[1], True)

    def _arrive(self, request: Request, from_load: bool) -> None:
        results = self.results
        if results.began_at is None:
            results.began_at = self.now
        results.ended_at = self.now
        results.sent += 1
        self._to_arrive -= 1
        if from_load:
            self._next_arrival()
        if request.prompt + request.output > self._longest:
            results.too_long += 1
            return
        if request.tenant:
            self._queue(request, self._setup.tenants[request.tenant])
            return
        admitted = self._admission.admitted(1)
        try:
            admitted.__enter__()
        except ApiError:
            results.rejected += 1
            return
        self._in_flight += 1
        self._dispatch(Flight(request, admitted, self.now))

    def _queue(self, request: Request, tenant: Tenant) -> None:
        """Waits in the fair queue of production."""
        ticket = Ticket(tenant, 1, lambda: self._start(flight), lambda error: self._reject(request))
        flight = Flight(request, _Place(self._fair, ticket), self.now)
        try:
            self._fair.submit(ticket)
        except ApiError:
            self._reject(request)

    def _start(self, flight: Flight) -> None:
        flight.stranded_s = self.now - flight.arrived_at
        self._in_flight += 1
        self._dispatch(flight)

    def _reject(self, request: Request) -> None:
        self.results.rejected += 1
        self.results.tenants[request.tenant].rejected += 1
        self._follow(request)

    def _follow(self, request: Request) -> None:
        """Sends the next request of a client."""
        if request.then is not None and (after := request.then()) is not None:
            self._to_arrive += 1
            self._at(self.now + after[0], self._arrive, after[1], False)

    def _dispatch(self, flight: Flight) -> None:
        replica = self._choose(flight)
        if replica is None:
            flight.stranded_at = self.now
            self._stranded[flight] = None
            self._at(self.now + REPLICA_WAIT_S, self._give_up, flight, flight.epoch)
            return
        flight.tries += 1
        flight.replica = replica
        replica.flights[flight] = None
        replica.busy += 1
        self._parse(flight, (flight.epoch, replica.engine.accept(self.now)))

    def _parse(self, flight: Flight, accepted: tuple[int, Parsing]) -> None:
        """Waits for the front end, which takes longer if other requests arrive meanwhile."""
        epoch, parsing = accepted
        if flight.epoch != epoch:
            return
        assert flight.replica is not None
        parsed_at = flight.replica.engine.front.parsed_at(self.now, parsing)
        if parsed_at > self.now:
            self._at(parsed_at, self._parse, flight, accepted)
            return
        spread = self._setup.request_spread
        factor = math.exp(self._random.gauss(0.0, spread)) if spread else 1.0
        self._at(self.now + parsing.wait_s + self._setup.request_s * factor, self._enter, flight, epoch)

    def _choose(self, flight: Flight) -> Replica | None:
        pick, lost = self._random.choice, flight.lost
        chosen = self._chooser.choose(flight, self.pools["decode"]) if self._chooser is not None else None
        decode = chosen.replica if chosen is not None else choice.least_busy(self.pools["decode"], _busy, lost, pick)
        found = decode
        if self._setup.prefill_replicas:
            found = choice.decode_or_standby(decode, lambda: choice.least_busy(self.pools["prefill"], _busy, lost, pick), lost)
        if self._chooser is not None and chosen is not None and found is decode:
            self._chooser.sent(flight, chosen)
            self.results.routed[chosen.reason] += 1
        elif found is not None:
            self.results.routed[LEAST_BUSY] += 1
        return found

    def _give_up(self, flight: Flight, epoch: int) -> None:
        if flight.epoch == epoch and flight in self._stranded:
            del self._stranded[flight]
            self._close(flight, failed=True)

    def _close(self, flight: Flight, failed: bool = False) -> None:
        """Ends a request; its client may then send the next one."""
        flight.epoch += 1
        flight.admission.__exit__(None, None, None)
        self._in_flight -= 1
        results, request = self.results, flight.request
        results.ended_at = self.now
        if failed:
            results.failed += 1
            return
        results.completed += 1
        results.input_tokens += request.prompt
        results.output_tokens += request.output
        results.ttft_s.append(flight.first_token_at - flight.arrived_at)
        results.queue_s.append(flight.queue_s)
        results.latency_s.append(self.now - flight.arrived_at)
        results.judge(results.ttft_s[-1], results.latency_s[-1], request.output)
        if request.tenant:
            tenant = results.tenants[request.tenant]
            tenant.completed += 1
            tenant.ttft_s.append(flight.first_token_at - flight.arrived_at)
        self._follow(request)

    def _enter(self, flight: Flight, epoch: int) -> None:
        """A request reaches its replica, which decides where to prefill it."""
        if flight.epoch != epoch:
            return
        replica, request = flight.replica, flight.request
        assert replica is not None
        flight.tried = frozenset()
        tokens = request.prompt + flight.emitted
        if replica.role == "prefill":
            self._prefill_locally(flight, STANDBY, 0)
        elif not self._setup.prefill_replicas:
            self._prefill_locally(flight, LOCAL, 0)
        else:
            cached = replica.engine.cached_tokens(request.text, tokens)
            peers: Any = _Peers(self.pools["prefill"])
            load = replica.pool_load
            prompt = policy.Prompt(tokens, cached)
            decision = policy.decide(prompt, load.here(), load.pool(peers), load.rates(), self._setup.rule)
            if decision.where == "remote":
                self._prefill_remotely(flight, decision)
            else:
                self._prefill_locally(flight, decision, tokens - cached)

    def _prefill_locally(self, flight: Flight, decision: Decision, tokens: int) -> None:
        replica = flight.replica
        assert replica is not None
        self.results.prefills["local", decision.reason] += 1
        if tokens:
            self._wait_in(flight, replica.pool_load.prefilling_here(tokens))
        self._submit(flight, remote=False)

    def _submit(self, flight: Flight, remote: bool) -> None:
        replica = flight.replica
        assert replica is not None
        sequence = Sequence(flight.request, flight.emitted, last_token_at=flight.last_token_at)
        sequence.flight, sequence.remote = flight, remote
        if flight.request.tenant:
            sequence.itl = self.results.tenants[flight.request.tenant].itl
        flight.sequence = sequence
        replica.engine.submit(sequence, self.now)

    def _wait_in(self, flight: Flight, queue: AbstractContextManager[None]) -> None:
        queue.__enter__()
        flight.queue = queue

    def _leave_queue(self, flight: Flight) -> None:
        if flight.queue is not None:
            flight.queue.__exit__(None, None, None)
            flight.queue = None

    def _prefill_remotely(self, flight: Flight, decision: Decision) -> None:
        replica, request = flight.replica, flight.request
        assert replica is not None
        load: Any = replica.pool_load
        tokens = request.prompt + flight.emitted
        peer = None
        if len(flight.tried) < policy.REMOTE_TRIES:
            peer = choice.least_busy(self.pools["prefill"], load.queued_tokens, flight.tried, self._random.choice)
        if peer is None or peer.name in flight.tried:
            self._prefill_locally(flight, PREFILL_FAILED, tokens)
            return
        if not flight.tried:
            self.results.prefills["remote", decision.reason] += 1
        flight.tried |= {peer.name}
        self._wait_in(flight, load.prefilling_at(peer, tokens))
        sequence = Sequence(request, flight.emitted, prefill_only=True)
        sequence.flight, sequence.replica = flight, peer
        flight.prefill = sequence
        peer.prefilling[sequence] = None
        peer.busy += 1
        peer.queue(tokens)
        peer.engine.submit(sequence, self.now)

    def _prefilled(self, flight: Flight, sequence: Sequence) -> None:
        """A prefill replica has computed a prompt, and its decode replica reads the blocks."""
        peer: Replica = sequence.replica
        del peer.prefilling[sequence]
        peer.busy -= 1
        tokens = sequence.tokens - sequence.begun  # without the token that was generated and is discarded
        peer.queue(-tokens)
        if sequence.cancelled:
            if sequence.begun:
                peer.engine.release(sequence, self.now)
            return
        replica = flight.replica
        assert replica is not None
        self._leave_queue(flight)
        replica.pool_load.prefilled_remotely(tokens - sequence.cached, self.now - sequence.admitted_at)
        if flight.queue_s < 0:
            flight.queue_s = flight.stranded_s + sequence.admitted_at - sequence.submitted_at
        flight.prefill, flight.source, flight.handed_at = None, (peer, sequence), self.now
        peer.prefilled[sequence] = None
        self._submit(flight, remote=True)

    def _transferred(self, flight: Flight, read: tuple[int, int]) -> None:
        epoch, tokens = read
        if flight.epoch != epoch or flight.source is None:
            return
        (peer, source), replica = flight.source, flight.replica
        assert replica is not None and flight.sequence is not None
        self._free_source(peer, source)
        flight.source = None
        seconds = self._setup.transfer_token_s * tokens
        replica.transfers.add(tokens, seconds, self.now)
        replica.engine.transferred(flight.sequence, self.now)

    def _free_source(self, peer: Replica, source: Sequence) -> None:
        if peer.prefilled.pop(source, 0) is None:
            peer.engine.release(source, self.now)

    def _blocks_lost(self, flight: Flight, epoch: int) -> None:
        """The blocks of a remote prefill died with their owner: the decode replica prefills."""
        if flight.epoch != epoch:
            return
        replica = flight.replica
        assert replica is not None and flight.sequence is not None
        replica.engine.withdraw(flight.sequence, self.now)
        flight.handed_at = 0.0
        self._prefill_locally(flight, PREFILL_FAILED, flight.request.prompt + flight.emitted)

    def wake_at(self, engine: Engine, at: float) -> None:
        self._at(at, self._wake, engine, engine.version)

    def _wake(self, engine: Engine, version: int) -> None:
        if engine.version == version:
            engine.wake(self.now)

    def began(self, sequence: Sequence, now: float) -> None:
        flight: Flight = sequence.flight
        if sequence.held:
            return
        replica = flight.replica
        assert replica is not None
        if flight.first_token_at < 0:
            flight.first_token_at = replica.engine.front.delivers(now)
        if flight.queue_s < 0:
            flight.queue_s = flight.stranded_s + sequence.admitted_at - sequence.submitted_at
        prompt = sequence.tokens - 1
        if self._chooser is not None:
            self._chooser.begun(flight)
            if not flight.handed_at:
                self._chooser.meter.prefilled(prompt - sequence.cached, now - sequence.admitted_at)
        if not self._setup.prefill_replicas:
            return
        if flight.handed_at:
            replica.pool_load.record_handoff(prompt, now - flight.handed_at)
            flight.handed_at = 0.0
        else:
            self._leave_queue(flight)
            replica.pool_load.record_local(prompt - sequence.cached, now - sequence.admitted_at)

    def ended(self, sequence: Sequence, now: float) -> None:
        flight: Flight = sequence.flight
        if sequence.held:
            self._prefilled(flight, sequence)
            return
        replica = flight.replica
        assert replica is not None
        if self._setup.prefill_replicas:
            self._leave_queue(flight)
        if self._chooser is not None and now > flight.first_token_at:
            self._chooser.meter.streamed(now - flight.first_token_at, replica.busy)
        delivered = max(replica.engine.front.delivers(now), flight.first_token_at)
        self._hang_up(flight)
        if delivered > now:
            self._at(delivered, lambda *_: self._close(flight), None, None)
        else:
            self._close(flight)

    def _hang_up(self, flight: Flight) -> None:
        replica = flight.replica
        assert replica is not None
        if self._chooser is not None:
            self._chooser.begun(flight)
        del replica.flights[flight]
        replica.busy -= 1
        flight.replica = flight.sequence = None

    def reads(self, sequence: Sequence, tokens: int) -> None:
        flight: Flight = sequence.flight
        seconds = self._setup.handoff_s + self._setup.transfer_token_s * tokens
        self._at(self.now + seconds, self._transferred, flight, (flight.epoch, tokens))

    def _join(self, role: Role, name: str) -> None:
        setup = self._setup
        settings = setup.decode_engine if role == "decode" else setup.prefill_engine
        assert settings is not None
        front = FrontEnd(setup.front_request_s, setup.front_token_s)
        engine = Engine(setup.times, settings, self, self.results.itl, front)
        if self._chooser is not None and role == "decode":
            self._chooser.join(name, engine)
        self.pools[role].append(Replica(name, role, engine, setup.rule.min_tokens, lambda: self.now))
        self.results.pools[role].replicas += 1

    def _kill(self, kill: Kill, _: None) -> None:
        replicas = self.pools[kill.role]
        replica = next((each for each in replicas if each.name.split(".")[0] == f"{kill.role}-{kill.index}"), None)
        if replica is None or not (self._in_flight or self._to_arrive):
            return  # it is down already, or the load is over
        replicas.remove(replica)
        self.remove(replica)
        self._at(self.now + self._setup.recovery_s, self._recover, kill.role, replica.name)

    def remove(self, replica: Replica) -> None:
        """Ends a replica that gets no new requests; those on it continue elsewhere."""
        replica.engine.kill(self.now)
        if self._chooser is not None:
            self._chooser.leave(replica)
        self._account(replica.role, replica, self.now)
        for sequence in list(replica.prefilling):
            self._prefill_lost(sequence)
        for sequence in list(replica.prefilled):
            flight: Flight = sequence.flight
            if flight.source is not None and flight.source[1] is sequence:  # else its reader died before
                flight.source = None
                self._at(self.now + policy.NOTICE_S, self._blocks_lost, flight, flight.epoch)
        replica.prefilled.clear()
        for flight in list(replica.flights):
            self._move(flight)

    def _recover(self, role: Role, name: str) -> None:
        base, _, generation = name.partition(".")
        self._join(role, f"{base}.{int(generation or 0) + 1}")
        self._dispatch_stranded()

    @property
    def replicas(self) -> dict[Role, list[Replica]]:
        return self.pools

    def call_at(self, at: float, handle: Callable[[], None]) -> None:
        self._at(at, lambda *_: handle(), None, None)

    def add(self, role: Role) -> None:
        self._order += 1
        self._join(role, f"{role}+{self._order}")
        self._dispatch_stranded()

    def withdraw(self, replica: Replica) -> None:
        self.pools[replica.role].remove(replica)

    def idles(self) -> bool:
        return not self._in_flight and not self._to_arrive

    def waiting_for_a_replica(self) -> int:
        return len(self._stranded)

    def seen(self) -> Seen:
        """Figures that gateways and engines report to the autoscaler."""
        results, decode, every = self.results, self.pools["decode"], [*self.pools["decode"], *self.pools["prefill"]]
        queried = sum(replica.engine.queried_tokens for replica in every)
        hit = sum(replica.engine.hit_tokens for replica in every)
        return Seen(
            at=self.now,
            arrivals=results.sent - results.too_long,
            ended=results.completed,
            prompt_tokens=results.input_tokens,
            output_tokens=results.output_tokens,
            in_flight=self._in_flight,
            waiting=len(self._stranded),
            cached_share=hit / queried if queried else 0.0,
            kv_use=sum(each.engine.cache.used / each.engine.cache.capacity for each in decode) / len(decode) if decode else 0.0,
        )

    def _dispatch_stranded(self) -> None:
        stranded = list(self._stranded)
        self._stranded.clear()
        for flight in stranded:
            flight.epoch += 1
            flight.stranded_s += self.now - flight.stranded_at
            self._dispatch(flight)

    def _prefill_lost(self, sequence: Sequence) -> None:
        flight: Flight = sequence.flight
        if sequence.cancelled:
            return
        self._leave_queue(flight)
        flight.prefill = None
        self._prefill_remotely(flight, PREFILL_FAILED)

    def _move(self, flight: Flight) -> None:
        """Continues a request on another replica, with the tokens that its client has."""
        if flight.prefill is not None:
            flight.prefill.cancelled = True
        if flight.source is not None:
            peer, source = flight.source
            self._at(self.now + LEASE_S, self._free_source, peer, source)
        flight.prefill = flight.source = None
        self._leave_queue(flight)
        replica, sequence = flight.replica, flight.sequence
        assert replica is not None
        if sequence is not None and sequence.emitted:
            flight.emitted, flight.last_token_at = sequence.emitted, sequence.last_token_at
        flight.lost |= {replica.name}
        flight.handed_at = 0.0
        self._hang_up(flight)
        flight.epoch += 1
        if flight.emitted == flight.request.output:
            self._close(flight)
        elif flight.tries == TRIES:
            self._close(flight, failed=True)
        else:
            self.results.migrated += flight.emitted > 0
            self.results.retried += not flight.emitted
            self._dispatch(flight)

    def _account(self, role: Role, replica: Replica, until: float) -> None:
        use, results, engine = self.results.pools[role], self.results, replica.engine
        up_s = until - replica.up_since
        use.up_s += up_s
        use.busy_s += engine.busy_s
        use.block_seconds += engine.block_seconds
        use.block_capacity_seconds += engine.cache.capacity * up_s
        use.peak = max(use.peak, engine.peak_blocks / engine.cache.capacity)
        results.preemptions += engine.preemptions
        results.queried_tokens += engine.queried_tokens
        results.hit_tokens += engine.hit_tokens
        results.steps += engine.steps


class _Place(AbstractContextManager[None]):
    """Place of a request in the fair queue, left at its end."""

    def __init__(self, queue: FairQueue, ticket: Ticket) -> None:
        self._queue, self._ticket = queue, ticket

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self._ticket)


class _Peers:
    """Replicas as `PoolLoad.pool` reads them."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas

    def all(self) -> list[Replica]:
        return self._replicas
