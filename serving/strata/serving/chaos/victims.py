"""The processes of an endpoint's replicas on this machine, found by the titles that Ray and vLLM give them."""

import contextlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

import psutil

from strata.platform.errors import UserError


class Kind(StrEnum):
    """A replica's own process, or the engine under it alone: the first takes its connections along, the second leaves a
    replica behind that must notice. The controller is Ray Serve's, which replaces the others and which no request passes. The
    GCS is Ray's, without which nothing new is placed."""

    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"
    PREFILL_ENGINE = "prefill-engine"
    DECODE_ENGINE = "decode-engine"
    CONTROLLER = "controller"
    GCS = "gcs"

    @property
    def role(self) -> str:
        return self.removesuffix("-engine")


OF_RAY = (Kind.CONTROLLER, Kind.GCS)
ROLES = (Kind.GATEWAY, Kind.PREFILL, Kind.DECODE)  # of replicas, which the endpoint counts
ENGINE = re.compile(r"VLLM::EngineCore\b")


@dataclass(frozen=True)
class Replica:
    pid: int
    created: float  # tells it from a later process with the same number


class Population(Protocol):
    def find(self, kind: Kind) -> list[Replica]: ...

    def kill(self, replica: Replica) -> None:
        """With SIGKILL. One that is gone already needs none."""


@dataclass(frozen=True)
class Processes:
    """Those that descend from `root`: the serve command, or the node of Ray that runs the replicas."""

    root: int

    def find(self, kind: Kind) -> list[Replica]:
        replicas = [process for process in _descendants(self.root) if is_replica(title(process), kind.role)]
        if kind == kind.role:
            return [_named(process) for process in replicas]
        return [_named(child) for process in replicas for child in _descendants(process.pid) if ENGINE.match(title(child))]

    def kill(self, replica: Replica) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(replica.pid)
            if process.create_time() == replica.created:
                process.kill()


def is_replica(title: str, role: str) -> bool:
    """While a method runs its name stands behind: `ray::ServeReplica:strata:decode.handle_request`."""
    if role == Kind.GCS:
        return title.endswith("/gcs_server")
    name = "ServeController" if role == Kind.CONTROLLER else f"ServeReplica:strata:{role}"
    return re.match(rf"ray::{name}\b", title) is not None


def title(process: psutil.Process) -> str:
    """Empty for one that has just ended."""
    try:
        return next(iter(process.cmdline()), "")
    except psutil.Error:
        return ""


def node_of(url: str) -> int:
    """The process under which the endpoint at `url` has its replicas: what started the gateway that listens there."""
    port = urlsplit(url).port
    listening = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid
    }
    for pid in sorted(listening):
        process = psutil.Process(pid)
        if is_replica(title(process), "gateway"):
            return _root(process)
    raise UserError(
        f"No Strata gateway on this machine listens at {url}, so there is nothing here to kill.",
        "Start the endpoint on this machine, as this user; or leave --url out, and one is started for you.",
    )


def _root(gateway: psutil.Process) -> int:
    """The command that started the Ray node, which may have started engines itself; the node where it has no such parent."""
    node = gateway.parent()
    assert node is not None
    return node.ppid() if node.ppid() > 1 else node.pid


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _named(process: psutil.Process) -> Replica:
    return Replica(process.pid, process.create_time())
