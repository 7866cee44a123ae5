"""First start of the application: a failed replica ends it, the death of the controller does not."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from strata.serving.runtime.deployments import NAME
from strata.serving.runtime.start import deploy


def application(status: str, **messages: str) -> Any:
    deployments = {name: SimpleNamespace(message=message) for name, message in messages.items()}
    return SimpleNamespace(applications={NAME: SimpleNamespace(status=status, message="", deployments=deployments)})


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces `serve.status` by these answers, one per call."""
    answers: list[Any] = []

    def status() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(deploy, "LOOK_S", 0.0)
    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(serve, "run_many", lambda targets, **_: None)
    return answers


def test_returns_when_the_application_runs(looks: list[Any]) -> None:
    looks += [application("DEPLOYING", decode=""), application("RUNNING", decode="")]
    deploy.bring_up(None)
    assert not looks


def test_waits_for_a_restarted_controller(looks: list[Any]) -> None:
    looks += [ActorDiedError(), SimpleNamespace(applications={}), application("DEPLOYING", decode=""), application("RUNNING")]
    deploy.bring_up(None)
    assert not looks


def test_first_failed_replica_raises(looks: list[Any]) -> None:
    looks += [application("DEPLOYING", gateway="", decode="A replica failed to start with exception. Error:\nValueError: no")]
    with pytest.raises(RuntimeError, match="ValueError: no"):
        deploy.bring_up(None)


@pytest.mark.parametrize("status", ["DELETING", "DEPLOY_FAILED"])
def test_deleted_and_failed_applications_raise(looks: list[Any], status: str) -> None:
    looks += [application(status, decode="waits")]
    with pytest.raises(RuntimeError):
        deploy.bring_up(None)


@pytest.mark.parametrize("status", ["DEPLOYING", "UNHEALTHY", "NOT_STARTED"])
def test_other_states_are_waited_for(looks: list[Any], status: str) -> None:
    looks += [application(status, decode="waits"), application("RUNNING", decode="a replica failed to start before")]
    deploy.bring_up(None)
    assert not looks


def test_the_start_does_not_wait_within_serve(monkeypatch: pytest.MonkeyPatch, looks: list[Any]) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "run_many", lambda targets, **more: started.append((targets, more)))
    looks += [application("RUNNING")]
    deploy.bring_up("app")
    [([target], more)] = started
    assert (target.target, target.name, target.route_prefix) == ("app", NAME, None)
    assert more == {"wait_for_ingress_deployment_creation": False, "wait_for_applications_running": False}
