"""Ray actor that owns a GPU process, from process titles.

Ray titles its workers `ray::ServeReplica:strata:decode`, or `ray::RayTrainWorker.execute` while a method runs; vLLM's engine
is a child of such a worker, titled `VLLM::EngineCore`. The first Ray title among a process and its parents names the actor.
"""

import re

import psutil

RAY = "ray::"
UNKNOWN = "unknown"
METHOD = re.compile(r"\.[A-Za-z_]\w*(\(\))?$")


def actor_of(pid: int) -> str:
    """Returns the actor's name, or `unknown` if the process is not visible: in a container, NVML reports the host's PIDs."""
    try:
        process = psutil.Process(pid)
        name = process.name()
        return next((_actor(title) for title in map(_title, (process, *process.parents())) if title.startswith(RAY)), name)
    except psutil.Error:
        return UNKNOWN


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()[:1]).strip()


def _actor(title: str) -> str:
    """Strips the method name, so that an actor is one series and not one per method."""
    return METHOD.sub("", title.removeprefix(RAY).split(" ")[0])
