"""Requests that crashed engines: identified by content, refused for ten minutes, and remembered in bounded number."""

import asyncio
import json
from typing import Any

import pytest
import virtual_time
from virtual_time import elapsed

from strata.serving.api.requests import ApiError
from strata.serving.gateway.suspects import Content, Suspects

GUILTY = {"strikes": 2, "guilty": True}


def content(method: str = "chat", **tree: Any) -> Content:
    return Content(method, json.dumps(tree).encode())


class Gateway:
    def __init__(self) -> None:
        self.now = 1000.0
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.suspects = Suspects(lambda digest, verdict: self.sent.append((digest, verdict)), clock=lambda: self.now)

    def refuses(self, one: Content) -> bool:
        try:
            self.suspects.strikes(one)
        except ApiError as error:
            assert error.status == 400 and "refused for 10 minutes" in str(error)
            return True
        return False


def suspected(strikes: int) -> dict[str, Any]:
    return {"strikes": strikes, "guilty": False}


@pytest.mark.parametrize("name", ["model", "stream", "stream_options", "seed", "session_id", "cache_salt", "user", "metadata"])
def test_parameters_that_change_no_computation_are_ignored(name: str) -> None:
    assert content(prompt="x", **{name: "y"}).digest == content(prompt="x").digest


def test_content_is_the_method_and_the_other_parameters_in_any_order() -> None:
    one = content(prompt="x", n=2)
    assert content(n=2, prompt="x").digest == one.digest
    assert content(n=2, prompt="x", top_p=None).digest == one.digest
    others = [content("completions", prompt="x", n=2), content(prompt="y", n=2), content(prompt="x", n=2, top_p=0)]
    assert len({one.digest, *(other.digest for other in others)}) == 4


def test_a_request_that_crashed_engines_is_refused_for_ten_minutes() -> None:
    gateway = Gateway()
    assert not gateway.refuses(content(n=1))
    assert gateway.suspects.judge(content(n=1), GUILTY) is True
    assert gateway.sent == [(content(n=1).digest, GUILTY)]
    assert gateway.refuses(content(n=1)) and not gateway.refuses(content(n=2))
    gateway.now += 599.9
    assert gateway.refuses(content(n=1))
    gateway.now = 1600.0
    assert not gateway.refuses(content(n=1)) and gateway.suspects.strikes(content(n=1)) == 0


def test_strikes_count_for_ten_minutes() -> None:
    gateway = Gateway()
    assert gateway.suspects.judge(content(n=1), suspected(1)) is False
    assert gateway.sent == [(content(n=1).digest, suspected(1))]
    assert gateway.suspects.strikes(content(n=1)) == 1 and gateway.suspects.strikes(content(n=2)) == 0
    gateway.now += 599.9
    gateway.suspects.record(content(n=2).digest, suspected(3))
    assert gateway.suspects.strikes(content(n=1)) == 1 and gateway.suspects.strikes(content(n=2)) == 3
    gateway.now = 1600.0
    assert gateway.suspects.strikes(content(n=1)) == 0 and gateway.suspects.strikes(content(n=2)) == 3


def test_the_digest_is_computed_only_if_there_are_suspects() -> None:
    gateway = Gateway()
    assert gateway.suspects.strikes(Content("chat", b"no JSON")) == 0
    gateway.suspects.record("one", suspected(1))
    with pytest.raises(ApiError, match="JSON"):
        gateway.suspects.strikes(Content("chat", b"no JSON"))
    refusing = Gateway()
    refusing.suspects.record("one", GUILTY)
    with pytest.raises(ApiError, match="JSON"):
        refusing.suspects.strikes(Content("chat", b"no JSON"))


def test_a_guilty_request_has_no_strikes_when_the_refusal_ends() -> None:
    gateway = Gateway()
    gateway.suspects.record(content(n=1).digest, suspected(1))
    gateway.suspects.record(content(n=1).digest, GUILTY)
    gateway.suspects._refused.clear()
    assert gateway.suspects.strikes(content(n=1)) == 0


def test_an_answered_request_is_no_longer_a_suspect() -> None:
    gateway = Gateway()
    gateway.suspects.record(content(n=1).digest, suspected(1))
    gateway.suspects.clear(content(n=1))
    gateway.suspects.clear(content(n=2))
    assert gateway.suspects.strikes(content(n=1)) == 0


@pytest.mark.parametrize("guilty", [True, False])
def test_the_last_1024_are_remembered(guilty: bool) -> None:
    gateway = Gateway()

    def known(number: int) -> bool:
        return gateway.refuses(content(n=number)) if guilty else gateway.suspects.strikes(content(n=number)) == 2

    def record(number: int) -> None:
        gateway.suspects.record(content(n=number).digest, {"strikes": 2, "guilty": guilty})

    for number in range(1024):
        record(number)
    assert known(0) and known(1023)
    record(0)  # again: it is now the newest
    record(1024)
    assert known(0) and known(1024) and known(2) and not known(1)


def test_identical_suspects_run_one_at_a_time() -> None:
    async def test() -> None:
        suspects = Suspects(lambda *verdict: None)
        order: list[tuple[float, int]] = []

        async def request(n: int) -> None:
            async with suspects.one_at_a_time(content(n=n)):
                order.append((elapsed(), n))
                await asyncio.sleep(1)

        await asyncio.gather(request(1), request(1), request(2))
        assert sorted(order) == [(0, 1), (0, 2), (1, 1)]

    virtual_time.run(test)
