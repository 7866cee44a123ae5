"""Whose a process on a GPU is, by the titles that processes give themselves.

Ray titles its workers `ray::ServeReplica:strata:decode`, or `ray::RayTrainWorker.execute` while a method runs; vLLM's engine
is a child of such a worker, titled `VLLM::EngineCore`. So the first Ray title among a process and its parents is the actor.
"""

import re

import psutil

RAY = "ray::"
UNKNOWN = "unknown"
METHOD = re.compile(r"\.[A-Za-z_]\w*(\(\))?$")


def actor_of(pid: int) -> str:
    """`unknown` for a process that cannot be seen from here: NVML gives the host's numbers to a container too."""
    try:
        process = psutil.Process(pid)
        name = process.name()
        return next((_actor(title) for title in map(_title, (process, *process.parents())) if title.startswith(RAY)), name)
    except psutil.Error:
        return UNKNOWN


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()[:1]).strip()


def _actor(title: str) -> str:
    """Without the method, which comes and goes: an actor is one series, not one a call."""
    return METHOD.sub("", title.removeprefix(RAY).split(" ")[0])
