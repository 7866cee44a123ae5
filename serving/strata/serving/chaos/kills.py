"""Schedules kills, and measures the time until each killed process is replaced."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from strata.platform.metrics import SERVE_REPLICAS
from strata.serving.chaos.client import Attempt, send
from strata.serving.chaos.requests import Request
from strata.serving.chaos.victims import OF_RAY, ROLES, Kind, Population, Replica
from strata.serving.metrics import counters

BACK_LIMIT_S = 300.0
PERIOD_S = 0.25  # poll interval of the processes
PROBE_S = 0.05
# Kills are scheduled between these shares of the load's expected duration.
FIRST, LAST = 0.05, 0.75
# The load continues for this long after the last replacement, which must serve requests too.
AFTER_S = 5.0
# A new controller needs this long to find its replicas. Those it rejects are gone by then.
SETTLE_S = 8.0
# Delay after which a busy client may notice a closed connection.
NOTICE_S = 2.0


ENGINES = (Kind.PREFILL, Kind.DECODE)
Fault = tuple[Kind, ...]  # processes killed simultaneously


@dataclass(frozen=True)
class Plan:
    kinds: Fault
    at_s: float  # since the load began

    @property
    def roles(self) -> set[str]:
        return {kind.role for kind in self.kinds}


@dataclass
class Kill:
    """One killed process. Times are of `time.monotonic`, or None if it did not happen within BACK_LIMIT_S."""

    kind: Kind
    pid: int
    at: float
    fault: int = 0  # number in the plan; kills of one fault are simultaneous
    back: float | None = None
    # For a gateway: time of the first accepted connection and of the first answered request.
    accepted: float | None = None
    answered: float | None = None

    def breaks(self, attempt: Attempt) -> bool:
        """True if this kill explains a failed attempt. A gateway's connections break with it, and none is up until the next."""
        if self.kind != Kind.GATEWAY or not attempt.retryable:
            return False
        over = float("inf") if self.answered is None else self.answered + NOTICE_S
        return self.at <= attempt.ended <= over


def plan(faults: Sequence[Fault], seed: int, expected_s: float) -> list[Plan]:
    """Spreads the faults: one in each of as many equal intervals, at a random time within it."""
    draw = random.Random(f"kills {seed}")
    order = draw.sample(faults, len(faults))
    share = (LAST - FIRST) / max(len(order), 1)
    return [Plan(kinds, expected_s * (FIRST + share * (part + draw.random()))) for part, kinds in enumerate(order)]


def at_random(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Draws `count` of the faults, with replacement."""
    return random.Random(f"blows {seed}").choices(faults, k=count)


@dataclass
class Killer:
    """Kills processes by a plan and waits for their replacement.

    `wanted` is the number of processes of each kind before any kill. `probe` is a request that tests whether the endpoint
    answers again. Without `overlap`, a replica is killed only after the last killed ones of its role are replaced, so one of two
    always runs. With `spare`, kills do not wait for that, but an engine is killed only while another answers."""

    http: httpx.AsyncClient  # with a new connection per request
    population: Population
    wanted: Mapping[str, int]
    meter: counters.Meter
    probe: Request
    seed: int
    overlap: bool
    spare: bool = False
    kills: list[Kill] = field(default_factory=list)
    recovered: bool = False
    stopped: bool = False  # no further kills, but waits for replacements
    over: bool = False

    def excuses(self, attempt: Attempt) -> bool:
        return any(kill.breaks(attempt) for kill in self.kills)

    async def carry_out(self, plans: Sequence[Plan]) -> None:
        """Carries out the plan. Sets `over` and returns some time after the last replacement."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            latest: dict[str, asyncio.Task[bool]] = {}
            for number, one in enumerate(plans):
                draw = random.Random(f"{number} {self.seed}")
                if self.spare:
                    await asyncio.sleep(began + one.at_s - time.monotonic())
                    if not await self._wait_for_spare_engine(one) or self.stopped:
                        break
                    tasks.create_task(self._all_back(await self._kill(number, one, draw)))
                    continue
                before = [] if self.overlap else [latest[role] for role in one.roles & latest.keys()]
                fault = tasks.create_task(self._kill_after(before, began, number, one, draw))
                latest |= dict.fromkeys(one.roles, fault)
        self.recovered = await self._wait_for_recovery()
        await asyncio.sleep(AFTER_S if plans else 0)
        self.over = True

    async def _kill_after(
        self, before: Sequence[asyncio.Task[bool]], began: float, number: int, one: Plan, draw: random.Random
    ) -> bool:
        """True if all killed processes were replaced."""
        for task in before:
            if not await task:
                return False  # not replaced: a further kill would add no information
        await asyncio.sleep(began + one.at_s - time.monotonic())
        if self.stopped:
            return False
        return await self._all_back(await self._kill(number, one, draw))

    async def _kill(self, number: int, one: Plan, draw: random.Random) -> list[tuple[Kill, set[Replica]]]:
        """Kills processes. Returns each kill with the processes of its kind alive before it; empty without a process to kill."""
        await self.meter.read()  # the counters of the killed processes are lost with them
        chosen = []
        for kind, times in Counter(one.kinds).items():
            alive = await self._find(kind)
            chosen += [(kind, victim, set(alive)) for victim in draw.sample(alive, min(times, len(alive)))]
        killed = []
        for kind, victim, alive_before in chosen:
            # Recorded first: a client may notice the kill before this continues.
            kill = Kill(kind, victim.pid, time.monotonic(), fault=number)
            self.kills.append(kill)
            self.population.kill(victim)
            killed.append((kill, alive_before))
        return killed

    async def _all_back(self, killed: Sequence[tuple[Kill, set[Replica]]]) -> bool:
        back = await asyncio.gather(*(self._wait_for_replacement(kill, alive) for kill, alive in killed))
        return bool(back) and all(back)

    async def _wait_for_spare_engine(self, one: Plan) -> bool:
        """Waits until more engines answer than the plan kills. Any of them may be chosen."""
        to_kill = sum(kind.role in ENGINES for kind in one.kinds)
        deadline = time.monotonic() + BACK_LIMIT_S
        while time.monotonic() < deadline and not self.stopped:
            if await self.meter.read() and sum(self._counted(role) for role in ENGINES) > to_kill:
                return True
            await asyncio.sleep(PERIOD_S)
        return False

    async def _wait_for_recovery(self) -> bool:
        """True if each role has as many answering replicas at the end as at the start."""
        deadline = time.monotonic() + BACK_LIMIT_S
        while time.monotonic() < deadline:
            if await self.meter.read() and all(self._counted(role) >= self.wanted[role] for role in ROLES if role in self.wanted):
                return True
            await asyncio.sleep(PERIOD_S)
        return False

    async def _find(self, kind: Kind) -> list[Replica]:
        """Waits for a process to kill: with overlap, the only one may be being replaced. Empty if none came."""
        deadline = time.monotonic() + BACK_LIMIT_S
        while not (alive := self.population.find(kind)) and time.monotonic() < deadline:
            await asyncio.sleep(PERIOD_S)
        return alive

    async def _wait_for_replacement(self, kill: Kill, alive_before: set[Replica]) -> bool:
        """Waits for the replacement. The limit counts from the latest kill, because later kills delay this replacement too."""
        replacement = asyncio.ensure_future(self._replaced(kill, alive_before))
        while not replacement.done():
            await asyncio.wait({replacement}, timeout=PERIOD_S)
            if time.monotonic() - self.kills[-1].at > BACK_LIMIT_S:
                replacement.cancel()
                return False
        replacement.result()
        kill.back = time.monotonic()
        return True

    async def _replaced(self, kill: Kill, alive_before: set[Replica]) -> None:
        if kill.kind == Kind.GATEWAY:
            await self._wait_for_gateway(kill)
        await self._wait_for_successor(kill.kind, alive_before)

    async def _wait_for_gateway(self, kill: Kill) -> None:
        address = self.http.base_url
        while kill.accepted is None:
            try:
                _, writer = await asyncio.open_connection(address.host, address.port)
                writer.close()
                kill.accepted = time.monotonic()
            except OSError:
                await asyncio.sleep(PROBE_S)
        while kill.answered is None:
            attempt = await send(self.http, self.probe)
            if attempt.answer:
                kill.answered = attempt.ended
            else:
                await asyncio.sleep(PROBE_S)

    async def _wait_for_successor(self, kind: Kind, before: set[Replica]) -> None:
        """Waits for a new process, the wanted number of processes, and the wanted number in the endpoint's own count."""
        while True:
            alive = self.population.find(kind)
            looked = time.monotonic()
            if len(alive) >= self.wanted[kind] and set(alive) - before:
                break
            await asyncio.sleep(PERIOD_S)
        if kind in OF_RAY:
            await asyncio.sleep(SETTLE_S)
            return
        while not (self.meter.at > looked and self._counted(kind.role) >= self.wanted[kind]):
            await asyncio.sleep(PERIOD_S)

    def _counted(self, role: str) -> float:
        return counters.by(self.meter.values, SERVE_REPLICAS, "role").get(role, 0.0)
