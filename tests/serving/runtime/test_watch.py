"""The lines that `strata serve` prints while its endpoint is not whole, and how it ends when the endpoint is lost."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from chaos_stand_in import stand_in

from strata.platform.errors import UserError
from strata.platform.recipe_file import load
from strata.serving.runtime import watch
from strata.serving.runtime.app import NAME
from strata.serving.runtime.watch import Looker, Seen, Watch

ONE_EACH = {"gateway": 1, "prefill": 1, "decode": 1}
WHOLE = Seen(ONE_EACH, controller=True)


def told(*looks: tuple[float, Seen]) -> list[str]:
    lines: list[str] = []
    one = Watch("http://e", ONE_EACH, lines.append)
    for now, seen in looks:
        one.take(seen, now)
    return lines


def test_a_whole_endpoint_prints_nothing() -> None:
    assert told((0, WHOLE), (2, WHOLE), (1000, WHOLE)) == []


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        (Seen(ONE_EACH | {"decode": 0}, True), "0 of 1 decode replicas answer; Ray Serve starts another one, prefill replicas"),
        (Seen(ONE_EACH | {"prefill": 0}, True), "0 of 1 prefill replicas answer; Ray Serve starts another one, decode replicas"),
        (Seen({"gateway": 1}, True), "requests wait for it"),
        (Seen(None, True), "No gateway answers at http://e"),
        (Seen(ONE_EACH, False), "controller does not answer. Requests are answered as before"),
    ],
)
def test_what_is_missing_is_said_once_and_so_is_its_return(seen: Seen, line: str) -> None:
    lines = told((0, WHOLE), (2, seen), (4, seen), (6, seen), (8, seen), (10, WHOLE), (12, WHOLE))
    assert any(line in one for one in lines[:-1])
    assert len(lines) == len(set(lines)) and "whole again: 1 gateway, 1 prefill, 1 decode" in lines[-1]


def test_what_is_over_at_once_is_not_said() -> None:
    missing = Seen(ONE_EACH | {"gateway": 0}, True)
    assert told((0, WHOLE), (2, missing), (4, WHOLE), (6, missing), (8, WHOLE)) == []


def test_a_second_trouble_is_said_beside_the_first() -> None:
    first, both = Seen(ONE_EACH | {"decode": 0}, True), Seen(ONE_EACH | {"decode": 0}, False)
    lines = told((0, WHOLE), (2, first), (6, first), (8, both), (12, both), (14, first), (16, WHOLE))
    assert ["decode" in lines[0], "controller" in lines[1], "whole" in lines[2]] == [True] * 3 and len(lines) == 3


def test_an_endpoint_that_serve_gave_up_is_lost_when_nothing_answers() -> None:
    with_answers = Seen(ONE_EACH | {"decode": 0}, True, "decode failed to start")
    assert len(told((0, WHOLE), (2, with_answers), (8, with_answers))) == 1  # prefill replicas answer
    without = Seen({"gateway": 1}, True, "decode failed to start")
    with pytest.raises(UserError, match="is lost: decode failed to start"):
        told((0, WHOLE), (2, without))


def test_an_endpoint_that_does_not_come_back_is_lost() -> None:
    gone = Seen(None, False)
    with pytest.raises(UserError, match="nothing has answered for 30"):
        told((0, WHOLE), *((now, gone) for now in range(2, 320, 2)))


def test_the_recipe_says_how_many_there_should_be() -> None:
    assert watch.wanted(load().serve) == ONE_EACH
    assert watch.wanted(load("laptop", ["serve.prefill.replicas=0", "serve.gateways=3"]).serve) == {"gateway": 3, "decode": 1}


def status(**deployments: str) -> Any:
    made = {name: SimpleNamespace(status=one, message=f"{name} \n failed") for name, one in deployments.items()}
    return SimpleNamespace(applications={NAME: SimpleNamespace(deployments=made)})


def test_looks_at_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.1)
    monkeypatch.setattr(watch, "ANSWER_S", 0.5)
    answers: list[Any] = [status(decode="HEALTHY"), status(decode="DEPLOY_FAILED"), SimpleNamespace(applications={})]
    with stand_in() as endpoint:
        looker = Looker(endpoint.url, lambda: answers.pop(0))
        assert looker.look() == Seen({"gateway": 1, "prefill": 1, "decode": 2}, True)
        assert looker.look().given_up == "decode failed"
        assert looker.look().given_up == "somebody deleted it"
        assert looker.look() == Seen({"gateway": 1, "prefill": 1, "decode": 2}, False)  # it raised
    assert looker.look().replicas is None


def test_a_controller_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.1)
    back, asked = threading.Event(), []

    def slow() -> Any:
        asked.append(1)
        back.wait(10)
        return status(decode="HEALTHY")

    with stand_in() as endpoint:
        looker = Looker(endpoint.url, slow)
        assert [looker.look().controller for _ in range(2)] == [False, False] and len(asked) == 1
        back.set()
        assert looker.look().controller
