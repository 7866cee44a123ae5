"""A Ray cluster of several nodes on this machine, each with its own raylet and, as root on Linux, its own network namespace.

`kill` ends a node as a power failure does: SIGKILL for its raylet and every worker, at once.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

START_S = 400.0
RAY = (sys.executable, "-m", "ray.scripts.scripts")
# `ray start` on a busy machine, with the patches with which Strata starts its own clusters. A raylet waits 15 s, a constant, for
# the files in which its agents write their ports; the ports are fixed here, so the files are written before.
START = """
from ray._private.node import Node
from ray._raylet import persist_port
from ray.scripts.scripts import main
from strata.platform.ray_patches import fewer_processes, registration_timeout

start_raylet = Node.start_raylet

def start_with_known_ports(node, *arguments, **options):
    for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port"):
        persist_port(node.get_session_dir_path(), node._node_id, name, getattr(node._ray_params, name))
    start_raylet(node, *arguments, **options)

Node.start_raylet = start_with_known_ports
with registration_timeout.extended(), fewer_processes.skipped():
    main()
"""
AGENTS = ("metrics-export", "dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent")
STARTED = "Ray runtime started."


@dataclass
class Machine:
    """One Ray node. `namespace` is empty where network namespaces are not allowed."""

    name: str
    process: subprocess.Popen[bytes]
    namespace: str = ""

    def node_id(self) -> str:
        words = next(one.cmdline() for one in self.processes() if one.name() == "raylet")
        return next(word.partition("=")[2] for word in words if word.startswith("--node_id="))

    def processes(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass
class Machines:
    """Context manager of the cluster. The head has no CPUs: it runs the GCS, and drivers connect to it."""

    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:4])
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    port: int = 0
    members: list[Machine] = field(default_factory=list)
    added: int = 0

    def __enter__(self) -> Self:
        self.namespaces = os.geteuid() == 0 and shutil.which("ip") is not None and self._bridge()
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.head_ip = f"{self._net()}.1" if self.namespaces else "127.0.0.1"
        self.port = _free_port()
        head = ("--head", f"--port={self.port}", f"--temp-dir={self.folder}", "--num-cpus=0", "--include-dashboard=false")
        try:
            self._launch("head", *head, namespace="")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members[::-1]:
            self._end(member)
        if self.namespaces:
            _ip("link", "del", self._bridge_name())
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        return f"{self.head_ip}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a command that connects to this cluster."""
        return {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def add(self, name: str, cpus: int) -> None:
        """Starts a node and waits until it has joined."""
        self.added += 1
        namespace = self._namespace(self.added) if self.namespaces else ""
        try:
            self._launch(name, f"--address={self.address}", f"--num-cpus={cpus}", namespace=namespace)
        except BaseException:
            if namespace:
                _ip("netns", "del", namespace)
            raise

    def kill(self, name: str) -> None:
        member = self._member(name)
        self.members.remove(member)
        self._end(member)

    def _member(self, name: str) -> Machine:
        return next(member for member in self.members if member.name == name)

    def drain(self, name: str, deadline_s: int) -> None:
        """Sends the notice of a preemption."""
        words = ["drain-node", "--address", self.address, "--node-id", self._member(name).node_id()]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot reclaim"]
        words += ["--deadline-remaining-seconds", str(deadline_s)]
        subprocess.run([*RAY, *words], check=True, capture_output=True, timeout=START_S, env=os.environ | self.environment)

    def _launch(self, name: str, *options: str, namespace: str) -> None:
        ip = f"{self._net()}.{namespace.rpartition('-')[2]}" if namespace else self.head_ip
        words = [sys.executable, "-c", START, "start", *options, f"--node-name={name}", f"--node-ip-address={ip}"]
        words += [f"--{agent}-port={_free_port()}" for agent in AGENTS]
        words += ["--object-store-memory=80000000"]
        words += ["--disable-usage-stats", "--block"]
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        # Hosts of a real cluster have names that resolve to their own addresses; these share one name.
        network = {"GLOO_SOCKET_IFNAME": "eth0"} if namespace else {}
        log = self.folder / f"{name}.log"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*inside, *words],
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=os.environ | self.environment | network,
                )
            while process.poll() is None and time.monotonic() < deadline:
                if STARTED in log.read_text(errors="replace"):
                    self.members.append(Machine(name, process, namespace))
                    return
                time.sleep(0.2)
            self._end(Machine(name, process))
        raise TimeoutError(f"{name} did not start: {log.read_text(errors='replace')[-1000:]}")

    def _end(self, member: Machine) -> None:
        processes = member.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        member.process.wait(timeout=30)
        psutil.wait_procs(processes, timeout=30)
        if member.namespace:
            _ip("netns", "del", member.namespace)

    def _net(self) -> str:
        return f"10.{77 + int(self.tag[:2], 16) % 100}.{int(self.tag[2:], 16)}"

    def _bridge_name(self) -> str:
        return f"strata-{self.tag}"

    def _bridge(self) -> bool:
        """Creates the switch of the nodes. False where the machine does not allow it."""
        bridge = self._bridge_name()
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{self._net()}.1/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
        except subprocess.CalledProcessError:
            return False
        return True

    def _namespace(self, number: int) -> str:
        """A network namespace with an address on the switch."""
        namespace, outside = f"strata-{self.tag}-{number + 1}", f"sv{self.tag}{number + 1}"
        _ip("netns", "add", namespace)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", outside, "master", self._bridge_name())
        _ip("link", "set", outside, "up")
        _ip("-n", namespace, "addr", "add", f"{self._net()}.{number + 1}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return namespace


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
