"""Waits and verdicts of the quarantine, to the second. Without an engine."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import virtual_time
from virtual_time import elapsed

from strata.serving.engine import suspect_requests
from strata.serving.engine.suspect_requests import Quarantine, cause_of_death, killed_for_memory

GUILTY, INNOCENT = {"strikes": 2, "guilty": True}, {"strikes": 2, "guilty": False}
POLL_S = 0.02


class Engine:
    """Quarantine, and the requests on the engine that have no first token yet."""

    def __init__(self) -> None:
        self.prefilling: set[str] = set()
        self.quarantine = Quarantine(lambda: bool(self.prefilling))


def on_engine(test: Callable[[Engine], Awaitable[None]]) -> None:
    async def inside() -> None:
        await test(Engine())

    virtual_time.run(inside, suspect_requests)


def since(moment: float) -> Any:
    """A moment, or at most two polls after it."""
    return pytest.approx(moment + POLL_S, abs=POLL_S + 1e-6)


def test_requests_without_strikes_enter_immediately() -> None:
    async def test(engine: Engine) -> None:
        engine.prefilling.add("other")
        await engine.quarantine.enter("other", 0)
        await engine.quarantine.enter("fresh", 0)
        assert elapsed() == 0
        assert engine.quarantine.verdict("fresh") == {"strikes": 1, "guilty": False}
        assert engine.quarantine.verdict("absent") is None

    on_engine(test)


def test_a_suspect_waits_ten_seconds_at_most_for_first_tokens_of_others() -> None:
    async def test(engine: Engine) -> None:
        engine.prefilling.add("stuck")
        await engine.quarantine.enter("stuck", 0)
        await engine.quarantine.enter("suspect", 1)
        assert elapsed() == since(10)
        assert engine.quarantine.verdict("suspect") == INNOCENT, "it was not isolated"

    on_engine(test)


def test_a_suspect_enters_when_the_others_have_their_first_tokens() -> None:
    async def test(engine: Engine) -> None:
        engine.prefilling.add("slow")
        await engine.quarantine.enter("slow", 0)
        asyncio.get_running_loop().call_later(4, engine.prefilling.clear)
        await engine.quarantine.enter("suspect", 1)
        assert elapsed() == since(4)
        assert engine.quarantine.verdict("suspect") == GUILTY

    on_engine(test)


def test_probation_ends_with_the_first_token_but_not_before_the_engine_knows_the_request() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("suspect", 1)
        assert elapsed() == 0
        await engine.quarantine.enter("late", 0)
        assert elapsed() == since(0.25)

    on_engine(test)


def test_probation_lasts_until_the_first_token() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("suspect", 1)
        engine.prefilling.add("suspect")
        asyncio.get_running_loop().call_later(3, engine.prefilling.clear)
        await engine.quarantine.enter("late", 0)
        assert elapsed() == since(3)

    on_engine(test)


def test_probation_ends_after_ten_seconds() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("suspect", 1)
        engine.prefilling.add("suspect")
        await engine.quarantine.enter("late", 0)
        assert elapsed() == since(10)
        assert engine.quarantine.verdict("suspect") == INNOCENT, "another request entered after it"

    on_engine(test)


def test_probation_ends_when_the_suspect_leaves() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("suspect", 1)
        engine.prefilling.add("suspect")
        asyncio.get_running_loop().call_later(2, engine.quarantine.leave, "suspect")
        await engine.quarantine.enter("late", 0)
        assert elapsed() == since(2)

    on_engine(test)


def test_a_suspect_of_two_failures_waits_thirty_seconds_to_be_alone() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("long", 0)  # it has its first token
        await engine.quarantine.enter("suspect", 2)
        assert elapsed() == since(30)
        assert engine.quarantine.verdict("suspect") == {"strikes": 3, "guilty": False}, "it was not alone"

    on_engine(test)


def test_a_suspect_of_two_failures_is_alone_for_thirty_seconds() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("suspect", 2)
        assert elapsed() == 0
        await engine.quarantine.enter("late", 0)
        assert elapsed() == since(30), "its first token does not end this"

    on_engine(test)


def test_a_suspect_of_two_failures_enters_when_the_engine_is_empty() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("long", 0)
        asyncio.get_running_loop().call_later(20, engine.quarantine.leave, "long")
        await engine.quarantine.enter("suspect", 2)
        assert elapsed() == since(20)
        assert engine.quarantine.verdict("suspect") == {"strikes": 3, "guilty": True}

    on_engine(test)


def test_suspects_are_on_probation_one_after_the_other() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("first", 1)
        engine.prefilling.add("first")
        await engine.quarantine.enter("second", 1)
        # Ten seconds of probation, then ten until the first suspect should have had its first token.
        assert elapsed() == pytest.approx(20, abs=0.1)
        assert engine.quarantine.verdict("first") == engine.quarantine.verdict("second") == INNOCENT

    on_engine(test)


def test_more_sequences_of_a_suspect_enter_with_it() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("suspect", 1)
        await engine.quarantine.enter("suspect", 1)
        assert elapsed() == 0
        engine.quarantine.leave("suspect")
        assert engine.quarantine.verdict("suspect") == GUILTY
        engine.quarantine.leave("suspect")
        assert engine.quarantine.verdict("suspect") is None
        engine.quarantine.leave("suspect")  # of a request that is gone: nothing happens

    on_engine(test)


def test_an_abandoned_wait_ends_the_probation() -> None:
    async def test(engine: Engine) -> None:
        engine.prefilling.add("stuck")
        await engine.quarantine.enter("stuck", 0)
        waiting = asyncio.ensure_future(engine.quarantine.enter("suspect", 1))
        await asyncio.sleep(1)
        waiting.cancel()
        await engine.quarantine.enter("late", 0)
        assert elapsed() == since(1)

    on_engine(test)


def test_after_probation_the_last_request_to_enter_is_the_cause() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("before", 0)
        await engine.quarantine.enter("suspect", 1)
        await asyncio.sleep(1)
        assert engine.quarantine.verdict("suspect") == GUILTY
        assert engine.quarantine.verdict("before") == {"strikes": 1, "guilty": False}
        await engine.quarantine.enter("after", 0)
        assert engine.quarantine.verdict("suspect") == INNOCENT
        engine.quarantine.leave("after")
        await engine.quarantine.enter("another suspect", 3)
        assert engine.quarantine.verdict("suspect") == INNOCENT

    on_engine(test)


def test_during_probation_the_suspect_is_the_cause_even_beside_an_older_suspect() -> None:
    async def test(engine: Engine) -> None:
        await engine.quarantine.enter("old suspect", 1)
        await asyncio.sleep(1)
        await engine.quarantine.enter("suspect", 1)
        assert engine.quarantine.verdict("suspect") == GUILTY
        assert engine.quarantine.verdict("old suspect") == INNOCENT
        await asyncio.sleep(1)
        assert engine.quarantine.verdict("suspect") == INNOCENT, "after the probation either may be the cause"

    on_engine(test)


@pytest.mark.parametrize(
    ("codes", "out_of_memory", "words", "failed"),
    [
        ([], False, "it raised an exception", True),
        ([None, None], True, "it raised an exception", True),
        ([-signal.SIGINT], False, "killed by SIGINT", False),
        ([0, 1], False, "exit code 1", True),
        ([-signal.SIGKILL, -signal.SIGSEGV], False, "killed by SIGSEGV", True),
        ([-signal.SIGKILL, 2], True, "exit code 2", True),
        ([-signal.SIGKILL], True, "out of memory", True),
        ([-signal.SIGKILL], False, "killed by SIGKILL", False),
        ([-signal.SIGTERM, -signal.SIGKILL], True, "killed by SIGTERM", False),
        ([0], True, "exit code 0", False),
        ([-1], False, "killed by SIGHUP", True),
    ],
)
def test_cause_of_death(codes: list[int | None], out_of_memory: bool, words: str, failed: bool) -> None:
    assert cause_of_death(codes, out_of_memory) == (words, failed)


@pytest.mark.parametrize(("text", "kills"), [("nr_free 7\noom_kill 3\npgfault 9\n", 3), ("nr_free 7\n", 0)])
def test_oom_kills_are_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch, text: str, kills: int) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text if str(path) == "/proc/vmstat" else "")
    assert killed_for_memory() == kills
