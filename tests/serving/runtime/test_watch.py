"""Lines that `strata serve` prints when replicas are missing, and its end when the endpoint is lost."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from chaos_stand_in import stand_in

from strata.platform.errors import UserError
from strata.platform.recipe_file import load
from strata.serving.catalogue.document import Catalogue, Model, Revision
from strata.serving.catalogue.store import Store
from strata.serving.metrics import counters
from strata.serving.runtime import watch
from strata.serving.runtime.deployments import NAME
from strata.serving.runtime.watch import Observation, Observer, Watch

ONE_EACH = {"gateway": 1, "prefill": 1, "decode": 1}
COMPLETE = Observation(ONE_EACH, controller=True)


def reported(*looks: tuple[float, Observation]) -> list[str]:
    lines: list[str] = []
    one = Watch("http://e", ONE_EACH, lines.append)
    for now, seen in looks:
        one.update(seen, now)
    return lines


def test_complete_endpoint_prints_nothing() -> None:
    assert reported((0, COMPLETE), (2, COMPLETE), (1000, COMPLETE)) == []


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        (
            Observation(ONE_EACH | {"decode": 0}, True),
            "0 of 1 decode replicas answer; Ray Serve is starting another, prefill replicas",
        ),
        (
            Observation(ONE_EACH | {"prefill": 0}, True),
            "0 of 1 prefill replicas answer; Ray Serve is starting another, decode replicas",
        ),
        (Observation({"gateway": 1}, True), "requests are queued meanwhile"),
        (Observation(None, True), "No gateway answers at http://e"),
        (Observation(ONE_EACH, False), "controller does not answer. Requests are answered as before"),
    ],
)
def test_outage_and_recovery_are_printed_once(seen: Observation, line: str) -> None:
    lines = reported((0, COMPLETE), (2, seen), (4, seen), (6, seen), (8, seen), (10, COMPLETE), (12, COMPLETE))
    assert any(line in one for one in lines[:-1])
    assert len(lines) == len(set(lines)) and "has recovered: 1 gateway, 1 prefill, 1 decode" in lines[-1]


def test_short_outage_is_not_printed() -> None:
    missing = Observation(ONE_EACH | {"gateway": 0}, True)
    assert reported((0, COMPLETE), (2, missing), (4, COMPLETE), (6, missing), (8, COMPLETE)) == []


def test_second_outage_is_printed_too() -> None:
    first, both = Observation(ONE_EACH | {"decode": 0}, True), Observation(ONE_EACH | {"decode": 0}, False)
    lines = reported((0, COMPLETE), (2, first), (6, first), (8, both), (12, both), (14, first), (16, COMPLETE))
    assert ["decode" in lines[0], "controller" in lines[1], "recovered" in lines[2]] == [True] * 3 and len(lines) == 3


def test_endpoint_is_lost_when_serve_gave_up_and_nothing_answers() -> None:
    with_answers = Observation(ONE_EACH | {"decode": 0}, True, "decode failed to start")
    assert len(reported((0, COMPLETE), (2, with_answers), (8, with_answers))) == 1  # prefill replicas answer
    without = Observation({"gateway": 1}, True, "decode failed to start")
    with pytest.raises(UserError, match="is lost: decode failed to start"):
        reported((0, COMPLETE), (2, without))


def test_endpoint_that_does_not_recover_is_lost() -> None:
    gone = Observation(None, False)
    with pytest.raises(UserError, match="nothing has answered for 30"):
        reported((0, COMPLETE), *((now, gone) for now in range(2, 320, 2)))


def test_wanted_replicas_of_the_recipe() -> None:
    assert watch.wanted(load().serve) == ONE_EACH
    assert watch.wanted(load("laptop", ["serve.prefill.replicas=0", "serve.gateways=3"]).serve) == {"gateway": 3, "decode": 1}


def test_replicas_of_a_further_model_are_watched_by_its_name() -> None:
    wanted = {"small decode": 1}
    lost = Observation(ONE_EACH | {"small gateway": 0}, True, further=wanted)
    lines = reported((0, lost), (watch.SURE_S, lost), (9, Observation(ONE_EACH | {"small decode": 1}, True, further=wanted)))
    assert "0 of 1 small decode replicas answer" in lines[0] and "recovered" in lines[1]


def test_an_updated_main_model_has_the_replicas_of_its_new_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def dumped(*words: str) -> dict[str, Any]:
        return load("laptop", [f"serve.{word}" for word in words]).serve.model_dump(mode="json")

    first = Revision("", "/a", dumped(), "ready")
    small = Revision("s", "/s", dumped("prefill.replicas=0", "decode.replicas=2"), "ready")
    models = {"main": Model((first,), main=True), "small": Model((small,))}
    catalogue = Catalogue(1, models)

    async def read(self: Store) -> Catalogue:
        return catalogue

    monkeypatch.setattr(Store, "read", read)
    assert watch.further("main") == {"small prefill": 0, "small decode": 2}
    catalogue = catalogue.update("main", replace(small, id="b", state="starting")).ready("main", "b", 1.0)
    assert watch.further("main") == {"prefill": 0, "decode": 2, "small prefill": 0, "small decode": 2}
    updated = {"prefill": 0, "decode": 2}
    one, two = (Observation({"gateway": 1, "decode": number}, True, further=updated) for number in (1, 2))
    lines = reported((0, two), (2, two), (4, one), (4 + watch.SURE_S, one), (9, two))
    assert "1 of 2 decode replicas answer" in lines[0] and lines[1] == "The endpoint has recovered: 1 gateway, 2 decode."


def test_roles_of_further_models_have_their_names() -> None:
    text = "".join(
        f'strata_serve_replicas{{model="{model}",role="{role}",replica="x"}} 1\n'
        for model, role in (("main", "decode"), ("main", "gateway"), ("main-2", "decode"))
    )
    observer = Observer("http://e", dict, "main")
    assert observer._roles(counters.parse(text)) == {"decode": 1, "gateway": 1, "main-2 decode": 1}


def status(**deployments: str) -> Any:
    made = {name: SimpleNamespace(status=one, message=f"{name} \n failed") for name, one in deployments.items()}
    return SimpleNamespace(applications={NAME: SimpleNamespace(deployments=made)})


def test_observations_of_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.1)
    monkeypatch.setattr(watch, "ANSWER_S", 0.5)
    answers: list[Any] = [status(decode="HEALTHY"), status(decode="DEPLOY_FAILED"), SimpleNamespace(applications={})]
    with stand_in() as endpoint:
        observer = Observer(endpoint.url, lambda: answers.pop(0))
        assert observer.observe() == Observation({"gateway": 1, "prefill": 1, "decode": 2}, True)
        assert observer.observe().given_up == "decode failed"
        assert observer.observe().given_up == "the application was deleted"
        assert observer.observe() == Observation({"gateway": 1, "prefill": 1, "decode": 2}, False)  # the status call raised
    assert observer.observe().replicas is None


def test_unresponsive_controller_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.1)
    back, calls = threading.Event(), []

    def slow() -> Any:
        calls.append(1)
        back.wait(10)
        return status(decode="HEALTHY")

    with stand_in() as endpoint:
        observer = Observer(endpoint.url, slow)
        assert [observer.observe().controller for _ in range(2)] == [False, False] and len(calls) == 1
        back.set()
        assert observer.observe().controller


def test_endpoint_that_was_scaled_to_zero_is_not_lost() -> None:
    lines: list[str] = []
    one = Watch("http://e", {"gateway": 1}, lines.append)
    for now in (0.0, 1000.0, 2000.0):
        one.update(Observation({"gateway": 1}, controller=True), now)
    assert not lines
    with pytest.raises(UserError, match="the application was deleted"):
        one.update(Observation({"gateway": 1}, controller=True, given_up="the application was deleted"), 2001.0)
    gone = Watch("http://e", {"gateway": 1}, lines.append)
    gone.update(Observation({"gateway": 1}, controller=True), 0.0)
    with pytest.raises(UserError, match="nothing has answered"):
        gone.update(Observation(None, controller=True), watch.LOST_S + 1)
