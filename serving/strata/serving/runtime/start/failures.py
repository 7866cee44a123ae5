"""Why a replica ended while it started, from its logs, Serve's status and the exception that the caller got."""

import re
from collections.abc import Iterable
from pathlib import Path

# Messages about a process that ended, which name no reason.
WITHOUT_A_REASON = (
    "Engine core initialization failed",
    "ActorDiedError",
    "RayActorError",
    "EngineDeadError",
    "Traceback (most recent call last)",  # Serve wraps another error's whole traceback into a RuntimeError
)


def ending(failure: str) -> str:
    """The process and exit code that vLLM names, a signal as a negative number; else the last lines, since Ray's and Serve's
    messages go on for pages."""
    for text in (*statuses(), failure):
        if ended := re.search(r"Failed core proc\(s\): \{'(\w+)': (-?\d+)\}", text):
            process, code = ended.groups()
            return f"{process} " + (f"was killed by signal {code[1:]}." if code.startswith("-") else f"exited with code {code}.")
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    return " ".join(lines[-2:])[:500]


def cause_of(failure: str, began: float) -> str | None:
    """The exception that ended an engine: from its log, Serve's status or `failure`. None if no exception is named anywhere, as
    after a kill."""
    return named_cause((*engine_logs(began), *statuses(), failure))


def named_cause(texts: Iterable[str]) -> str | None:
    """The last exception with a reason in the first text that has one."""
    for text in texts:
        errors = re.findall(r"\b\w+(?:Error|Exception): .+(?:\n {2}\S.*)*", text)  # pydantic continues in indented lines
        reasons = [" ".join(error.split()) for error in errors if not any(word in error for word in WITHOUT_A_REASON)]
        if reasons:
            return reasons[-1][:500]
    return None


def statuses() -> list[str]:
    from ray import serve

    return [d.message for application in serve.status().applications.values() for d in application.deployments.values()]


def engine_logs(began: float) -> list[str]:
    texts = [path.read_text(errors="replace") for path in logs(began)]
    return ["\n".join(line for line in text.splitlines() if "EngineCore" in line) for text in texts]


def logs(began: float) -> list[Path]:
    """Logs that Ray's workers on this machine have written since `began`, the newest last. A cluster that stays also has logs of
    older endpoints."""
    import ray

    node = ray._private.worker._global_node
    if node is None:  # the cluster is gone
        return []
    changed = {path: path.stat() for path in Path(node.get_logs_dir_path()).glob("worker-*.???")}
    return sorted(
        (path for path, stat in changed.items() if stat.st_mtime >= began and stat.st_size),
        key=lambda path: changed[path].st_mtime,
    )
