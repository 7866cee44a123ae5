"""The kills: when, which, and how long until the endpoint has another in its place."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from strata.platform.metrics import SERVE_REPLICAS
from strata.serving.chaos import counters
from strata.serving.chaos.client import Attempt, send
from strata.serving.chaos.requests import Request
from strata.serving.chaos.victims import Kind, Population, Replica

BACK_LIMIT_S = 300.0
PERIOD_S = 0.25  # between two looks at the processes
PROBE_S = 0.05
# Parts of the load's expected length between which kills fall.
FIRST, LAST = 0.05, 0.75
# How long requests still come when the last killed replica is back: it must take its share of them.
AFTER_S = 5.0
# How much later than the kernel a busy client may notice that its connection is gone.
NOTICE_S = 2.0


@dataclass(frozen=True)
class Plan:
    kind: Kind
    at_s: float  # since the load began


@dataclass
class Kill:
    """Moments are of `time.monotonic`; None: it did not come to that within BACK_LIMIT_S."""

    kind: Kind
    pid: int
    at: float
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


def plan(kinds: Sequence[Kind], seed: int, expected_s: float) -> list[Plan]:
    """One in each of as many equal parts, so that they are spread, at a random moment of its part."""
    draw = random.Random(f"kills {seed}")
    order = draw.sample(kinds, len(kinds))
    share = (LAST - FIRST) / max(len(order), 1)
    return [Plan(kind, expected_s * (FIRST + share * (part + draw.random()))) for part, kind in enumerate(order)]


@dataclass
class Killer:
    """`wanted` is how many there are of each kind when nobody is killed. `probe` is a request that shows whether the endpoint
    answers again. Without `overlap` a replica is not killed before the last one killed of its role is back, so that of two
    there is always one."""

    http: httpx.AsyncClient  # opens a new connection each time
    population: Population
    wanted: Mapping[Kind, int]
    meter: counters.Meter
    probe: Request
    seed: int
    overlap: bool
    kills: list[Kill] = field(default_factory=list)
    over: bool = False

    def excuses(self, attempt: Attempt) -> bool:
        return any(kill.breaks(attempt) for kill in self.kills)

    async def carry_out(self, plans: Sequence[Plan]) -> None:
        """Returns, and is `over`, some time after the last replica is back."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for role in sorted({one.kind.role for one in plans}):
                mine = [one for one in plans if one.kind.role == role]
                tasks.create_task(self._one_role(mine, began, random.Random(f"{role} {self.seed}"), tasks))
        await asyncio.sleep(AFTER_S if plans else 0)
        self.over = True

    async def _one_role(self, plans: Sequence[Plan], began: float, draw: random.Random, tasks: asyncio.TaskGroup) -> None:
        previous: asyncio.Task[bool] | None = None
        for one in plans:
            if previous and not self.overlap and not await previous:
                return  # the endpoint did not replace that one: a further kill would show nothing new
            await asyncio.sleep(began + one.at_s - time.monotonic())
            await self.meter.read()  # what its process has counted goes with it
            alive = await self._find(one.kind)
            if not alive:
                return
            victim = draw.choice(alive)
            # Noted first: a client may feel it before this goes on.
            kill = Kill(one.kind, victim.pid, time.monotonic())
            self.kills.append(kill)
            self.population.kill(victim)
            previous = tasks.create_task(self._see_back(kill, alive))

    async def _find(self, kind: Kind) -> list[Replica]:
        """With overlap the only one may be gone just now. None: nobody came in its place."""
        deadline = time.monotonic() + BACK_LIMIT_S
        while not (alive := self.population.find(kind)) and time.monotonic() < deadline:
            await asyncio.sleep(PERIOD_S)
        return alive

    async def _see_back(self, kill: Kill, alive_before: Sequence[Replica]) -> bool:
        try:
            async with asyncio.timeout(BACK_LIMIT_S):
                if kill.kind == Kind.GATEWAY:
                    await self._see_answers(kill)
                await self._see_successor(kill.kind, set(alive_before))
        except TimeoutError:
            return False
        kill.back = time.monotonic()
        return True

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
        while not (self.meter.at > looked and self._counted(kind) >= self.wanted[kind]):
            await asyncio.sleep(PERIOD_S)

    def _counted(self, kind: Kind) -> float:
        return counters.by(self.meter.values, SERVE_REPLICAS, "role").get(kind.role, 0.0)
