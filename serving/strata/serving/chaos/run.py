"""The phases: every request once in peace, then all of them again while replicas are killed."""

import asyncio
import contextlib
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from strata.platform.errors import UserError
from strata.serving.chaos import kills
from strata.serving.chaos.client import Answer, fresh_connections
from strata.serving.chaos.load import Sent, drive
from strata.serving.chaos.requests import TOKEN_IDS, Request
from strata.serving.chaos.victims import ROLES, Kind, Population, Processes, Replica
from strata.serving.metrics import counters


class Verdict(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    LOST = "lost"


@dataclass(frozen=True)
class Pass:
    """One time through the load. `counted` is what the endpoint counted meanwhile."""

    began: float
    ended: float
    sent: tuple[Sent, ...]
    counted: Mapping[counters.Series, float]

    @property
    def longest_gap_s(self) -> float:
        return max((attempt.longest_gap_s for one in self.sent for attempt in one.attempts), default=0.0)


@dataclass(frozen=True)
class Outcome:
    requests: tuple[Request, ...]
    peace: Pass
    storm: Pass
    planned: tuple[kills.Plan, ...]
    kills: tuple[kills.Kill, ...]
    whole: bool = True  # in the end every role had as many replicas as before
    restarted: int = 0  # replicas that ended although nobody killed them

    @property
    def expected(self) -> dict[int, Answer]:
        """By the request's number."""
        return {one.number: one.last.answer for one in self.peace.sent if one.last.answer}

    def verdicts(self) -> list[Verdict]:
        """Of what was sent in the storm, in that order."""
        expected = self.expected
        return [_verdict(one.last.answer, expected[one.number]) for one in self.storm.sent]

    def count(self, verdict: Verdict) -> int:
        return self.verdicts().count(verdict)

    @property
    def broken_by_gateway(self) -> int:
        """Requests, each of which may have been sent again more than once."""
        return sum(len(one.attempts) > 1 for one in self.storm.sent)

    @property
    def sent_again(self) -> int:
        return sum(len(one.attempts) - 1 for one in self.storm.sent)

    @property
    def not_back(self) -> int:
        """Kills after which no other came, and those that were therefore not made."""
        not_made = len(self.planned) - len({kill.blow for kill in self.kills})
        return not_made + sum(kill.back is None for kill in self.kills)

    @property
    def holds(self) -> bool:
        return self.count(Verdict.SAME) == len(self.storm.sent) and not self.not_back and self.whole and not self.restarted


def _verdict(answer: Answer | None, expected: Answer) -> Verdict:
    if answer is None:
        return Verdict.LOST
    return Verdict.SAME if answer == expected else Verdict.DIFFERENT


def run(
    url: str,
    root_pid: int,
    requests: Sequence[Request],
    blows: Sequence[kills.Blow],
    concurrency: int,
    seed: int,
    overlap: bool = False,
    peace: Pass | None = None,
    spare: bool = False,
) -> Outcome:
    """Against an endpoint that runs, with its replicas among the descendants of `root_pid`. Each of `blows` is killed at once;
    `peace` is an earlier outcome's, if the undisturbed answers are known. `overlap` and `spare` are `Killer`'s."""
    return asyncio.run(disturb(url, Processes(root_pid), requests, blows, concurrency, seed, overlap, peace, spare))


async def disturb(
    url: str,
    population: Population,
    requests: Sequence[Request],
    blows: Sequence[kills.Blow],
    concurrency: int,
    seed: int,
    overlap: bool = False,
    peace: Pass | None = None,
    spare: bool = False,
) -> Outcome:
    kinds = {kind for blow in blows for kind in blow}
    before = {kind: set(population.find(kind)) for kind in (kinds | set(ROLES))}
    wanted: dict[str, int] = {kind: len(found) for kind, found in before.items()}
    for kind in kinds:
        if not wanted[kind]:
            raise UserError(f"There is no {kind} process to kill.", "Serve with one, or leave it out of --kill.")
    salt = uuid.uuid4().hex  # the endpoint may have these prompts in its cache from an earlier run
    peace = peace or await _in_peace(url, requests, concurrency, f"{salt}-peace")
    planned = kills.plan(blows, seed, peace.ended - peace.began)
    async with _watched(url) as meter:
        killer = kills.Killer(meter.http, population, wanted, meter, _probe(requests[0].body["model"]), seed, overlap, spare)
        began = time.monotonic()
        async with _stopped_by_ctrl_c(killer), asyncio.TaskGroup() as group:
            group.create_task(killer.carry_out(planned))
            # Until it is over: a kill that comes late still comes under load, and new replicas are put to work.
            sent = await drive(url, requests, concurrency, f"{salt}-storm", lambda: not killer.over, killer.excuses)
            ended = time.monotonic()
    storm = Pass(began, ended, tuple(sent), meter.increases)
    if killer.stopped:
        made = {kill.blow for kill in killer.kills}
        planned = [one for number, one in enumerate(planned) if number in made]
    restarted = sum(_restarted(kind, before[kind], population, killer.kills) for kind in ROLES)
    return Outcome(tuple(requests), peace, storm, tuple(planned), tuple(killer.kills), killer.whole, restarted)


@contextlib.asynccontextmanager
async def _stopped_by_ctrl_c(killer: kills.Killer) -> AsyncIterator[None]:
    """The first Ctrl-C ends the kills, so that what was measured is reported; the second one ends the command."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        killer.stopped = True
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _restarted(role: Kind, before: set[Replica], population: Population, made: Sequence[kills.Kill]) -> int:
    """Replicas of a role that ended although neither they nor an engine of theirs was killed."""
    killed = {kill.pid for kill in made}
    gone = {replica for replica in before - set(population.find(role)) if replica.pid not in killed}
    return max(0, len(gone) - sum(kill.kind.role == role != kill.kind for kill in made))


async def _in_peace(url: str, requests: Sequence[Request], concurrency: int, salt: str) -> Pass:
    async with _watched(url) as meter:
        began = time.monotonic()
        sent = await drive(url, requests, concurrency, salt)
        ended = time.monotonic()
    for one in sent:
        if one.last.error:
            raise UserError(
                f"Request {one.number} was not answered although nothing was killed: {one.last.error}",
                "Mend the endpoint first: there is no undisturbed answer to compare with.",
            )
    return Pass(began, ended, tuple(sent), meter.increases)


@contextlib.asynccontextmanager
async def _watched(url: str) -> AsyncIterator[counters.Meter]:
    async with fresh_connections(url) as http:
        meter = counters.Meter(http)
        if not await meter.read():
            raise UserError(f"{url}/metrics does not answer.", "Give the address of a Strata endpoint that runs (--url).")
        watching = asyncio.create_task(meter.watch())
        try:
            yield meter
        finally:
            watching.cancel()
        await meter.read()


def _probe(model: str) -> Request:
    """One token is enough to show that the whole way through the endpoint works."""
    return Request(
        "/v1/completions", {"model": model, "prompt": [TOKEN_IDS[0]], "max_tokens": 1, "temperature": 0, "stream": False}
    )
