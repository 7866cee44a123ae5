"""Turns of adapters in an engine's slots."""

import asyncio
from collections.abc import Awaitable, Callable

from strata.serving.adapters.turns import PASSED_S, Turns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(test: Callable[[Turns, Clock], Awaitable[None]], slots: int = 2) -> None:
    async def begin() -> None:
        clock = Clock()
        async with asyncio.timeout(10):
            await test(Turns(slots, clock), clock)

    asyncio.run(begin())


async def begun(turns: Turns, name: str) -> "asyncio.Task[None]":
    task = asyncio.ensure_future(turns.wait(name))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def test_requests_of_an_adapter_share_its_slot() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        for name in ("a", "a", "b", "a"):
            assert (await begun(turns, name)).done()
        third = await begun(turns, "c")
        assert not third.done() and turns.waiting == 1
        turns.leave("b")
        await third
        assert (turns.users("a"), turns.users("b"), turns.users("c")) == (3, 0, 1)

    run(test)


def test_a_request_is_passed_for_a_while_only() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        await turns.wait("a")
        await turns.wait("b")
        third = await begun(turns, "c")
        assert (await begun(turns, "a")).done()
        clock.now = PASSED_S + 0.1
        late = await begun(turns, "a")
        assert not late.done() and not third.done()
        turns.leave("a")
        assert not late.done()  # one request of `a` runs still, and yet nobody passes
        turns.leave("a")
        await third
        assert not late.done()
        turns.leave("b")
        await late

    run(test)


def test_every_adapter_has_its_turn_beside_two_that_never_pause() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        served: list[str] = []

        async def flood(name: str) -> None:
            while len(served) < 3:
                await turns.wait(name)
                await asyncio.sleep(0)
                clock.now += 0.05
                turns.leave(name)

        async def once(name: str) -> None:
            await turns.wait(name)
            served.append(name)
            turns.leave(name)

        floods = [flood(name) for name in ("a", "a", "b", "b")]
        await asyncio.gather(*floods, *(once(name) for name in ("c", "d", "e")))
        assert sorted(served) == ["c", "d", "e"]

    run(test)


def test_cancelled_requests_free_their_turn() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        await turns.wait("a")
        waiting, behind = await begun(turns, "b"), await begun(turns, "c")
        waiting.cancel()
        await asyncio.wait({waiting})
        turns.leave("a")
        await behind
        granted = await begun(turns, "d")
        turns.leave("c")
        granted.cancel()  # it has its slot, and has not run since
        await asyncio.wait({granted})
        assert granted.cancelled()
        assert turns.users("d") == 0 and (await begun(turns, "e")).done()

    run(test, slots=1)


def test_a_turn_that_comes_free_in_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    async def test(turns: Turns, clock: Clock) -> None:
        await turns.wait("a")
        second, third = await begun(turns, "b"), await begun(turns, "c")
        second.cancel()
        turns.leave("a")  # before the task of the cancelled request runs
        await asyncio.wait({second, third})
        assert second.cancelled() and third.done()
        assert (turns.users("b"), turns.users("c"), turns.waiting) == (0, 1, 0)
        turns.leave("c")
        await turns.wait("b")

    run(test, slots=1)
