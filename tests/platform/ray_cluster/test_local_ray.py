"""Start of a local Ray cluster that is slow or fails, with a stand-in for `ray.init`."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from strata.platform.errors import UserError
from strata.platform.ray_cluster import local_ray

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


def starts(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> list[dict[str, Any]]:
    """Replaces `ray.init` by these outcomes, one per call. Returns the options of each call."""
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


def test_start_is_retried_once_after_a_timeout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    context = SimpleNamespace()
    calls = starts(monkeypatch, Exception(SLOW), context)
    with ExitStack() as stores:
        assert local_ray._start(2, False, stores) is context and len(calls) == 2
    first, second = (call["_system_config"]["gcs_storage_path"] for call in calls)
    assert first != second  # a failed start leaves an unusable store
    assert capsys.readouterr().err == "Ray did not start, as happens on a busy machine; trying once more.\n"


@pytest.mark.parametrize("outcomes", [(Exception(SLOW), Exception(SLOW)), (RuntimeError("no such thing\nand more"),)])
def test_failed_start_raises_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Exception, ...]) -> None:
    starts(monkeypatch, *outcomes)
    with ExitStack() as stores, pytest.raises(UserError, match="The local Ray cluster did not start: ") as raised:
        local_ray._start(2, False, stores)
    assert "\n" not in raised.value.cause
