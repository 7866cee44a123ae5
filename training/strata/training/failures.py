"""Translates Ray Train's errors into user errors with the root cause."""

from collections.abc import Iterator

from strata.platform import file_errors
from strata.platform.errors import UserError

NOT_PLACED = {"WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError", "InsufficientClusterResourcesError"}
# Ray Train wraps errors of workers and of the controller several times; each wrapper has another attribute for the inner error.
INNER = ("worker_failures", "controller_failure", "_base_exc", "cause", "__cause__")


def explain(error: BaseException, run: str) -> Exception | None:
    """User error with cause and fix, None for an error that the user cannot fix."""
    again = f"resume with: strata train --resume {run}"
    for cause in _causes(error):
        if isinstance(cause, UserError):
            return cause
        text = str(cause)
        if "OutOfMemory" in text or "out of memory" in text:
            fix = "Lower train.micro_batch, reduce the model's size, or raise parallel.zero."
            return UserError("The workers ran out of memory.", fix)
        if explained := file_errors.explain(cause, again):
            return explained
    if lost := _lost(error):
        return UserError(lost, f"Their last lines: strata logs {run}. {again[0].upper()}{again[1:]}")
    return None


def not_placed(error: BaseException) -> bool:
    """True if the workers never ran: the cluster had no resources for them in time, or lost a node while they started."""
    return any(type(cause).__name__ in NOT_PLACED for cause in _causes(error))


def _lost(error: BaseException) -> str | None:
    """Message for workers that died without raising an error, more often than train.max_failures allows."""
    kinds = {type(cause).__name__: " ".join(str(cause).split())[:200] for cause in _causes(error)}
    for kind in ("NodeDiedError", "ActorDiedError", "RayActorError", "ActorUnavailableError", "WorkerCrashedError"):
        if kind in kinds:
            return f"Workers, their controller or their node died more often than train.max_failures allows: {kinds[kind]}"
    if kinds.keys() & {"SystemExit", "LocalRayletDiedError", "RaySystemError", "RpcError"}:
        return "The connection to the Ray cluster was lost."
    if "WorkerGroupStartupTimeoutError" in kinds:
        return "The workers did not start in time: the cluster has too few free CPUs or GPUs, or is very busy."
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all errors that it wraps, innermost first: those are the most specific."""
    seen: list[BaseException] = []

    def visit(one: object) -> None:
        if isinstance(one, dict):
            for value in one.values():
                visit(value)
        elif isinstance(one, BaseException) and one not in seen:
            seen.append(one)
            for name in INNER:
                visit(getattr(one, name, None))

    visit(error)
    return reversed(seen)
