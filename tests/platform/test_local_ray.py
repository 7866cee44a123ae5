"""A Ray cluster that is slow to start, with Ray's part played by the test."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import services

from strata.platform.errors import UserError
from strata.platform.ray_cluster import local_ray

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


def starts(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> list[dict[str, Any]]:
    """What `ray.init` does, call by call; returns what it was called with."""
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        calls.append(options)
        outcome = outcomes[len(calls) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return calls


def test_a_start_that_timed_out_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    context = SimpleNamespace()
    calls = starts(monkeypatch, Exception(SLOW), context)
    with ExitStack() as stores:
        assert local_ray._start(2, False, stores) is context and len(calls) == 2
    first, second = (call["_system_config"]["gcs_storage_path"] for call in calls)
    assert first != second  # what a failed start left in its store is of no use
    assert capsys.readouterr().err == "Ray did not start, as happens on a busy machine; trying once more.\n"


@pytest.mark.parametrize("outcomes", [(Exception(SLOW), Exception(SLOW)), (RuntimeError("no such thing\nand more"),)])
def test_one_that_does_not_start_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Exception, ...]
) -> None:
    starts(monkeypatch, *outcomes)
    with ExitStack() as stores, pytest.raises(UserError, match="The local Ray cluster did not start: ") as raised:
        local_ray._start(2, False, stores)
    assert "\n" not in raised.value.cause


def test_ray_waits_longer_for_its_node_than_its_own_30_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node": 1}])

    def registered(*_: object) -> dict[str, int]:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", registered)
    monkeypatch.setattr(local_ray, "SLOW_S", 0.0)
    with local_ray._patience():
        assert services.get_node("address", "node") == {"node": 1}
    assert services.get_node is registered
    assert capsys.readouterr().err == "Ray is starting slowly, as happens on a busy machine; still waiting.\n"
