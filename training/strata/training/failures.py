"""Errors of Ray Train, reduced to their cause and turned into errors for the user."""

from collections.abc import Iterator

from strata.platform import file_errors
from strata.platform.errors import UserError

# Ray Train wraps an error of a worker or of its controller in several of its own, each with another attribute for the inner one.
INNER = ("worker_failures", "controller_failure", "_base_exc", "cause", "__cause__")


def explain(error: BaseException, run: str) -> Exception | None:
    """None for an error that is nobody's to mend but ours."""
    again = f"go on with: strata train --resume {run}"
    for cause in _causes(error):
        if isinstance(cause, UserError):
            return cause
        text = str(cause)
        if "OutOfMemory" in text or "out of memory" in text:
            fix = "Lower train.micro_batch or the model's size, or raise parallel.zero."
            return UserError("The workers ran out of memory.", fix)
        if explained := file_errors.explain(cause, again):
            return explained
    if lost := _lost(error):
        return UserError(lost, f"If it happens again, see 'strata doctor'. {again[0].upper()}{again[1:]}")
    return None


def _lost(error: BaseException) -> str | None:
    """For workers that died without an error of their own, more often than train.max_failures allows."""
    kinds = {type(cause).__name__: " ".join(str(cause).split())[:200] for cause in _causes(error)}
    for kind in ("NodeDiedError", "ActorDiedError", "RayActorError", "ActorUnavailableError", "WorkerCrashedError"):
        if kind in kinds:
            return f"Workers, their controller or their machine were lost, and train.max_failures allows no more: {kinds[kind]}"
    if kinds.keys() & {"SystemExit", "LocalRayletDiedError", "RaySystemError", "RpcError"}:
        return "The connection to the Ray cluster was lost."
    if "WorkerGroupStartupTimeoutError" in kinds:
        return "The workers did not start in time: the cluster has too few free CPUs or GPUs, or is very busy."
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it wraps, inner ones first: they say more."""
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
