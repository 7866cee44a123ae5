"""Messages for errors of Ray Train, with stand-ins that have the names and attributes of its errors."""

import errno

import pytest

from strata.platform.errors import UserError
from strata.training.failures import explain


def error(name: str, text: str = "", **inner: object) -> BaseException:
    made: BaseException = type(name, (Exception,), {})(text)
    for key, value in inner.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize("text", ["CUDA error: OutOfMemoryError", "CUDA out of memory. Tried to allocate"])
def test_workers_without_memory(text: str) -> None:
    explained = explain(error("WorkerGroupError", "failed", worker_failures={0: error("RuntimeError", text)}), "r")
    assert isinstance(explained, UserError) and explained.cause == "The workers ran out of memory."
    assert "train.micro_batch" in explained.fix


@pytest.mark.parametrize("key", ["controller_failure", "_base_exc", "cause"])
def test_cause_is_found_behind_any_wrapper(key: str) -> None:
    own = UserError("cause", "fix")
    assert explain(error("Outer", "failed", **{key: error("Inner", "failed", worker_failures={3: own})}), "r") is own


def test_raised_from_is_a_wrapper_too() -> None:
    outer, own = error("Outer"), UserError("cause", "fix")
    outer.__cause__ = own
    assert explain(outer, "r") is own


def test_innermost_error_counts() -> None:
    """The outer text mentions memory, but a full disk is the cause."""
    inner = OSError(errno.ENOSPC, "No space left on device", "/data/part")
    explained = explain(error("Outer", "out of memory", cause=inner), "r")
    assert isinstance(explained, UserError) and explained.cause == "/data/part: No space left on device."


def test_errors_that_wrap_each_other_end() -> None:
    one, other = error("One"), error("Other")
    one.cause, other.cause = other, one  # type: ignore[attr-defined]
    assert explain(one, "r") is None


DIED = "Workers, their controller or their node died more often than train.max_failures allows: "


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        *((name, DIED + "a b") for name in ("NodeDiedError", "ActorDiedError", "RayActorError", "ActorUnavailableError")),
        ("WorkerCrashedError", DIED + "a b"),
        *(
            (name, "The connection to the Ray cluster was lost.")
            for name in ("LocalRayletDiedError", "RaySystemError", "RpcError")
        ),
        (
            "WorkerGroupStartupTimeoutError",
            "The workers did not start in time: the cluster has too few free CPUs or GPUs, or is very busy.",
        ),
    ],
)
def test_lost_workers_and_clusters(name: str, cause: str) -> None:
    explained = explain(error("WorkerGroupError", "failed", worker_failures={1: error(name, "a\n  b")}), "mine")
    assert isinstance(explained, UserError) and explained.cause == cause
    assert explained.fix == "Their last lines: strata logs mine. Resume with: strata train --resume mine"


def test_ended_controller_is_a_lost_connection() -> None:
    explained = explain(error("Outer", "", cause=SystemExit(1)), "r")
    assert isinstance(explained, UserError) and explained.cause == "The connection to the Ray cluster was lost."


def test_node_is_named_before_its_workers_and_long_texts_are_cut() -> None:
    failures = {0: error("ActorDiedError", "actor"), 1: error("NodeDiedError", "n" * 300), 2: error("RpcError", "rpc")}
    explained = explain(error("WorkerGroupError", "failed", worker_failures=failures), "r")
    assert isinstance(explained, UserError) and explained.cause == DIED + "n" * 200


def test_other_errors_are_not_explained() -> None:
    assert explain(ZeroDivisionError("division by zero"), "r") is None
