"""Runs all requests undisturbed, and then again while replicas are killed."""

import asyncio
import contextlib
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from strata.platform.errors import UserError
from strata.serving.chaos import kills
from strata.serving.chaos.adapters import Churn, Result
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
    """One run of the load. `counted`: increases of the endpoint's counters."""

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
    baseline: Pass
    disturbed: Pass
    planned: tuple[kills.Plan, ...]
    kills: tuple[kills.Kill, ...]
    recovered: bool = True  # every role had as many replicas at the end as before
    restarted: int = 0  # replicas that ended without a kill
    adapters: Result | None = None  # that came and went

    @property
    def expected(self) -> dict[int, Answer]:
        """Answers of the undisturbed run, by the request's number."""
        return {one.number: one.last.answer for one in self.baseline.sent if one.last.answer}

    def verdicts(self) -> list[Verdict]:
        """Verdicts on the disturbed run, in the order sent."""
        expected = self.expected
        return [_verdict(one.last.answer, expected[one.number]) for one in self.disturbed.sent]

    def count(self, verdict: Verdict) -> int:
        return self.verdicts().count(verdict)

    @property
    def broken_by_gateway(self) -> int:
        """Number of requests with retries."""
        return sum(len(one.attempts) > 1 for one in self.disturbed.sent)

    @property
    def sent_again(self) -> int:
        return sum(len(one.attempts) - 1 for one in self.disturbed.sent)

    @property
    def not_back(self) -> int:
        """Kills without a replacement, and planned kills that were skipped for that reason."""
        not_made = len(self.planned) - len({kill.fault for kill in self.kills})
        return not_made + sum(kill.back is None for kill in self.kills)

    @property
    def holds(self) -> bool:
        return (
            self.count(Verdict.SAME) == len(self.disturbed.sent)
            and not self.not_back
            and self.recovered
            and not self.restarted
            and not (self.adapters and self.adapters.failures)
        )


def _verdict(answer: Answer | None, expected: Answer) -> Verdict:
    if answer is None:
        return Verdict.LOST
    return Verdict.SAME if answer == expected else Verdict.DIFFERENT


def run(
    url: str,
    root_pid: int,
    requests: Sequence[Request],
    faults: Sequence[kills.Fault],
    concurrency: int,
    seed: int,
    overlap: bool = False,
    baseline: Pass | None = None,
    spare: bool = False,
    passing: Mapping[str, Path] | None = None,
) -> Outcome:
    """Runs against an endpoint with replicas among the descendants of `root_pid`.

    The processes of each fault are killed simultaneously. `baseline`: the undisturbed run of an earlier outcome, to reuse.
    See `Killer` for `overlap` and `spare`. `passing`: folders of adapters that come and go meanwhile, by name."""
    population = Processes(root_pid)
    return asyncio.run(disturb(url, population, requests, faults, concurrency, seed, overlap, baseline, spare, passing))


async def disturb(
    url: str,
    population: Population,
    requests: Sequence[Request],
    faults: Sequence[kills.Fault],
    concurrency: int,
    seed: int,
    overlap: bool = False,
    baseline: Pass | None = None,
    spare: bool = False,
    passing: Mapping[str, Path] | None = None,
) -> Outcome:
    kinds = {kind for fault in faults for kind in fault}
    before = {kind: set(population.find(kind)) for kind in (kinds | set(ROLES))}
    wanted: dict[str, int] = {kind: len(found) for kind, found in before.items()}
    for kind in kinds:
        if not wanted[kind]:
            raise UserError(f"There is no {kind} process to kill.", f"Serve with a {kind} process, or remove it from --kill.")
    salt = uuid.uuid4().hex  # the endpoint's prefix cache may have these prompts from an earlier run
    churn = Churn(url, passing or {})
    baseline = baseline or await _undisturbed(url, requests, concurrency, f"{salt}-baseline", churn)
    undisturbed = len(churn.load_s)
    planned = kills.plan(faults, seed, baseline.ended - baseline.began)
    async with _watched(url) as meter:
        killer = kills.Killer(meter.http, population, wanted, meter, _probe(requests[0].body["model"]), seed, overlap, spare)
        began = time.monotonic()
        async with _stopped_by_ctrl_c(killer), asyncio.TaskGroup() as group:
            group.create_task(killer.carry_out(planned))
            group.create_task(churn.go(lambda: killer.over, killer.excuses))
            # Until the kills are over: late kills happen under load too, and new replicas serve requests.
            sent = await drive(url, requests, concurrency, f"{salt}-disturbed", lambda: not killer.over, killer.excuses)
            ended = time.monotonic()
    disturbed = Pass(began, ended, tuple(sent), meter.increases)
    if killer.stopped:
        made = {kill.fault for kill in killer.kills}
        planned = [one for number, one in enumerate(planned) if number in made]
    restarted = sum(_restarted(kind, before[kind], population, killer.kills) for kind in ROLES)
    result = Result.of(churn, undisturbed) if passing else None
    made_kills = tuple(killer.kills)
    return Outcome(tuple(requests), baseline, disturbed, tuple(planned), made_kills, killer.recovered, restarted, result)


@contextlib.asynccontextmanager
async def _stopped_by_ctrl_c(killer: kills.Killer) -> AsyncIterator[None]:
    """The first Ctrl-C stops the kills, so that results are reported. The second ends the command."""
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
    """Number of replicas of a role that ended although neither they nor their engines were killed."""
    killed = {kill.pid for kill in made}
    gone = {replica for replica in before - set(population.find(role)) if replica.pid not in killed}
    return max(0, len(gone) - sum(kill.kind.role == role != kill.kind for kill in made))


async def _undisturbed(url: str, requests: Sequence[Request], concurrency: int, salt: str, churn: Churn) -> Pass:
    over = asyncio.Event()
    async with _watched(url) as meter, asyncio.TaskGroup() as group:
        began = time.monotonic()
        group.create_task(churn.go(over.is_set))
        sent = await drive(url, requests, concurrency, salt)
        ended = time.monotonic()
        over.set()
    for one in sent:
        if one.last.error:
            raise UserError(
                f"Request {one.number} failed in the undisturbed run: {one.last.error}",
                "Fix the endpoint first: there is no undisturbed answer to compare with.",
            )
    return Pass(began, ended, tuple(sent), meter.increases)


@contextlib.asynccontextmanager
async def _watched(url: str) -> AsyncIterator[counters.Meter]:
    async with fresh_connections(url) as http:
        meter = counters.Meter(http)
        if not await meter.read():
            raise UserError(f"{url}/metrics does not answer.", "Pass the address of a running Strata endpoint (--url).")
        watching = asyncio.create_task(meter.watch())
        try:
            yield meter
        finally:
            watching.cancel()
        await meter.read()


def _probe(model: str) -> Request:
    """A request for one token, which passes through the whole endpoint."""
    return Request(
        "/v1/completions", {"model": model, "prompt": [TOKEN_IDS[0]], "max_tokens": 1, "temperature": 0, "stream": False}
    )
