"""The kills: when, which, and how long until the endpoint has another in its place."""

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
PERIOD_S = 0.25  # between two looks at the processes
PROBE_S = 0.05
# Parts of the load's expected length between which kills fall.
FIRST, LAST = 0.05, 0.75
# How long requests still come when the last killed replica is back: it must take its share of them.
AFTER_S = 5.0
# How long a new controller takes to find its replicas: those that it rejects are gone then.
SETTLE_S = 8.0
# How much later than the kernel a busy client may notice that its connection is gone.
NOTICE_S = 2.0


ENGINES = (Kind.PREFILL, Kind.DECODE)
Blow = tuple[Kind, ...]  # killed at once


@dataclass(frozen=True)
class Plan:
    kinds: Blow
    at_s: float  # since the load began

    @property
    def roles(self) -> set[str]:
        return {kind.role for kind in self.kinds}


@dataclass
class Kill:
    """Moments are of `time.monotonic`; None: it did not come to that within BACK_LIMIT_S."""

    kind: Kind
    pid: int
    at: float
    blow: int = 0  # of the plan: kills of one blow are made at once
    back: float | None = None
    # Of a gateway: the first new connection that was accepted, the first request that was answered.
    accepted: float | None = None
    answered: float | None = None

    def breaks(self, attempt: Attempt) -> bool:
        """A gateway takes the connections that it holds along, and until there is another nobody answers."""
        if self.kind != Kind.GATEWAY or not attempt.retryable:
            return False
        over = float("inf") if self.answered is None else self.answered + NOTICE_S
        return self.at <= attempt.ended <= over


def plan(blows: Sequence[Blow], seed: int, expected_s: float) -> list[Plan]:
    """One in each of as many equal parts, so that they are spread, at a random moment of its part."""
    draw = random.Random(f"kills {seed}")
    order = draw.sample(blows, len(blows))
    share = (LAST - FIRST) / max(len(order), 1)
    return [Plan(kinds, expected_s * (FIRST + share * (part + draw.random()))) for part, kinds in enumerate(order)]


def at_random(blows: Sequence[Blow], count: int, seed: int) -> list[Blow]:
    """So many, each one of `blows`."""
    return random.Random(f"blows {seed}").choices(blows, k=count)


@dataclass
class Killer:
    """`wanted` is how many there are of each kind when nobody is killed. `probe` is a request that shows whether the endpoint
    answers again. Without `overlap` a replica is not killed before the last ones killed of its role are back, so that of two
    there is always one; with `spare` it is, but an engine only while another one answers."""

    http: httpx.AsyncClient  # opens a new connection each time
    population: Population
    wanted: Mapping[str, int]
    meter: counters.Meter
    probe: Request
    seed: int
    overlap: bool
    spare: bool = False
    kills: list[Kill] = field(default_factory=list)
    whole: bool = False
    stopped: bool = False  # kills nobody any more, but still sees the killed ones replaced
    over: bool = False

    def excuses(self, attempt: Attempt) -> bool:
        return any(kill.breaks(attempt) for kill in self.kills)

    async def carry_out(self, plans: Sequence[Plan]) -> None:
        """Returns, and is `over`, some time after the last replica is back."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            latest: dict[str, asyncio.Task[bool]] = {}
            for number, one in enumerate(plans):
                draw = random.Random(f"{number} {self.seed}")
                if self.spare:
                    await asyncio.sleep(began + one.at_s - time.monotonic())
                    if not await self._see_that_others_answer(one) or self.stopped:
                        break
                    tasks.create_task(self._all_back(await self._strike(number, one, draw)))
                    continue
                before = [] if self.overlap else [latest[role] for role in one.roles & latest.keys()]
                blow = tasks.create_task(self._strike_after(before, began, number, one, draw))
                latest |= dict.fromkeys(one.roles, blow)
        self.whole = await self._see_whole()
        await asyncio.sleep(AFTER_S if plans else 0)
        self.over = True

    async def _strike_after(
        self, before: Sequence[asyncio.Task[bool]], began: float, number: int, one: Plan, draw: random.Random
    ) -> bool:
        """Whether everything it killed came back."""
        for task in before:
            if not await task:
                return False  # the endpoint did not replace that one: a further kill would show nothing new
        await asyncio.sleep(began + one.at_s - time.monotonic())
        if self.stopped:
            return False
        return await self._all_back(await self._strike(number, one, draw))

    async def _strike(self, number: int, one: Plan, draw: random.Random) -> list[tuple[Kill, set[Replica]]]:
        """The kills, each with those of its kind that were alive before it. None if there was nobody to kill."""
        await self.meter.read()  # what their processes have counted goes with them
        chosen = []
        for kind, times in Counter(one.kinds).items():
            alive = await self._find(kind)
            chosen += [(kind, victim, set(alive)) for victim in draw.sample(alive, min(times, len(alive)))]
        struck = []
        for kind, victim, alive_before in chosen:
            # Noted first: a client may feel it before this goes on.
            kill = Kill(kind, victim.pid, time.monotonic(), blow=number)
            self.kills.append(kill)
            self.population.kill(victim)
            struck.append((kill, alive_before))
        return struck

    async def _all_back(self, struck: Sequence[tuple[Kill, set[Replica]]]) -> bool:
        back = await asyncio.gather(*(self._see_back(kill, alive) for kill, alive in struck))
        return bool(back) and all(back)

    async def _see_that_others_answer(self, one: Plan) -> bool:
        """Waits until an engine would be left. Those that it kills may be any, so all of them count as answering now."""
        killed = sum(kind.role in ENGINES for kind in one.kinds)
        deadline = time.monotonic() + BACK_LIMIT_S
        while time.monotonic() < deadline and not self.stopped:
            if await self.meter.read() and sum(self._counted(role) for role in ENGINES) > killed:
                return True
            await asyncio.sleep(PERIOD_S)
        return False

    async def _see_whole(self) -> bool:
        """Whether as many replicas of each role answer in the end as in the beginning."""
        deadline = time.monotonic() + BACK_LIMIT_S
        while time.monotonic() < deadline:
            if await self.meter.read() and all(self._counted(role) >= self.wanted[role] for role in ROLES if role in self.wanted):
                return True
            await asyncio.sleep(PERIOD_S)
        return False

    async def _find(self, kind: Kind) -> list[Replica]:
        """With overlap the only one may be gone just now. None: nobody came in its place."""
        deadline = time.monotonic() + BACK_LIMIT_S
        while not (alive := self.population.find(kind)) and time.monotonic() < deadline:
            await asyncio.sleep(PERIOD_S)
        return alive

    async def _see_back(self, kill: Kill, alive_before: set[Replica]) -> bool:
        """The time counts from the latest kill: one that comes meanwhile delays this one's successor too."""
        seeing = asyncio.ensure_future(self._see_it_replaced(kill, alive_before))
        while not seeing.done():
            await asyncio.wait({seeing}, timeout=PERIOD_S)
            if time.monotonic() - self.kills[-1].at > BACK_LIMIT_S:
                seeing.cancel()
                return False
        seeing.result()
        kill.back = time.monotonic()
        return True

    async def _see_it_replaced(self, kill: Kill, alive_before: set[Replica]) -> None:
        if kill.kind == Kind.GATEWAY:
            await self._see_answers(kill)
        await self._see_successor(kill.kind, alive_before)

    async def _see_answers(self, kill: Kill) -> None:
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

    async def _see_successor(self, kind: Kind, before: set[Replica]) -> None:
        """A new process, as many as there were, and as many that the endpoint itself counts as answering."""
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
