"""Finds the processes of an endpoint on this machine, by the process titles that Ray and vLLM set."""

import contextlib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

import psutil

from strata.platform.errors import UserError


class Kind(StrEnum):
    """A kind of process to kill.

    A replica loses its connections. If only its engine is killed, the replica must notice. Ray Serve's controller replaces
    replicas and handles no requests. Without Ray's GCS nothing new is placed."""

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
ROLES = (Kind.GATEWAY, Kind.PREFILL, Kind.DECODE)  # of replicas, which the endpoint's metrics count
ENGINE = re.compile(r"VLLM::EngineCore\b")


@dataclass(frozen=True)
class Replica:
    pid: int
    created: float  # distinguishes it from a later process with the same PID


class Population(Protocol):
    def find(self, kind: Kind) -> list[Replica]: ...

    def kill(self, replica: Replica) -> None:
        """Sends SIGKILL. Does nothing if the process has ended."""


@dataclass(frozen=True)
class Processes:
    """Descendants of `root`: the serve command, or the Ray node that runs the replicas."""

    root: int

    def find(self, kind: Kind) -> list[Replica]:
        replicas = [process for process in _descendants(self.root) if is_replica(title(process), kind.role)]
        if kind == kind.role:
            return [_replica(process) for process in replicas]
        return [_replica(child) for process in replicas for child in _descendants(process.pid) if ENGINE.match(title(child))]

    def kill(self, replica: Replica) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(replica.pid)
            if process.create_time() == replica.created:
                process.kill()


def is_replica(title: str, role: str) -> bool:
    """True if a title is of that role, of any model. Ray appends the running method:
    `ray::ServeReplica:strata:decode.handle_request`."""
    if role == Kind.GCS:
        return title.endswith("/gcs_server")
    name = "ServeController" if role == Kind.CONTROLLER else rf"ServeReplica:strata(\.[^:]+)?:{role}"
    return re.match(rf"ray::{name}\b", title) is not None


def title(process: psutil.Process) -> str:
    """The process title; empty if the process has just ended."""
    try:
        return next(iter(process.cmdline()), "")
    except psutil.Error:
        return ""


def node_of(url: str) -> int:
    """The ancestor of the replicas of the endpoint at `url`, found through the gateway that listens there."""
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
        f"No Strata gateway on this machine listens at {url}.",
        "Start the endpoint on this machine as this user, or omit --url to start one.",
    )


def _root(gateway: psutil.Process) -> int:
    """The command that started the Ray node, which may have started engines itself, or else the Ray node."""
    node = gateway.parent()
    assert node is not None
    return node.ppid() if node.ppid() > 1 else node.pid


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _replica(process: psutil.Process) -> Replica:
    return Replica(process.pid, process.create_time())
