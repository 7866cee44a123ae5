"""Loss and restart of a cluster's head node, with its state in a real Redis.

Two Ray nodes on this machine stand in for pods: a head without CPUs, as in `infra/components/gcs-ft`, and a worker with the
engine and the gateway. The head's processes are killed simultaneously, as with a lost pod.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from strata.platform import ports

pytestmark = [pytest.mark.slow, pytest.mark.rotation]

BIN = Path(sys.executable).parent
PASSWORD = "secret-of-the-test"
AWAY_S = 5.0

DEPLOY = """
import ray
from ray import serve
from strata.serving.runtime import deployments
from strata.serving.runtime.kuberay_app import Arguments, application

ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
serve.start(proxy_location="Disabled")
serve.run(application(Arguments(recipe={recipe!r}, model={model!r}, name="tiny")), name=deployments.NAME, route_prefix=None)
"""


class NodeDidNotStart(Exception):
    """Raised when `ray start` gives up, which it does after a fixed time, also on a machine that is only busy."""


@contextmanager
def process(*command: str, **environment: str) -> Iterator[psutil.Process]:
    """Runs a command in its own session, and kills it with all its descendants at the end."""
    started = subprocess.Popen(command, env=os.environ | environment, start_new_session=True, stdout=subprocess.DEVNULL)
    here = psutil.Process(started.pid)
    try:
        yield here
    finally:
        kill_all(here)
        started.wait()


def kill_all(root: psutil.Process) -> None:
    """Kills a process tree. SIGSTOP comes first, so that no process notices the death of another."""
    processes = [root, *root.children(recursive=True)] if root.is_running() else []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for member in processes:
            try:
                member.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def run(script: str) -> str:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "STRATA_LINK_SECRET": "secret"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(what: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
        time.sleep(0.5)


@dataclass
class Client(threading.Thread):
    """Repeats the same greedy request."""

    url: str
    answers: list[tuple[float, str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.ended.wait(0.1):
            self.answers.append((time.monotonic(), complete(self.url)))


def complete(url: str) -> str:
    try:
        request = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=request, timeout=60)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"
    except httpx.HTTPError as error:
        return repr(error)


def test_endpoint_outlives_the_head_and_recovers_after_its_restart(trained: Path, tmp_path: Path) -> None:
    redis = shutil.which("redis-server", path=f"{BIN}:{os.environ['PATH']}")
    if redis is None:
        pytest.skip("There is no redis-server; 'make test' downloads one on systems with apt.")
    for tries_left in (1, 0):
        with ExitStack() as held:
            numbers = [held.enter_context(ports.reserve()).port for _ in range(3)]
            # A new pod has a new folder. Short paths, because Ray creates Unix sockets in them.
            folders = [held.enter_context(tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)) for _ in range(2)]
            try:
                return lose_and_restore_the_head(trained, tmp_path, redis, numbers, folders)
            except NodeDidNotStart:
                if not tries_left:
                    raise


def lose_and_restore_the_head(trained: Path, tmp_path: Path, redis: str, numbers: list[int], folders: list[str]) -> None:
    port, redis_port, head_port = numbers
    (tmp_path / "redis.conf").write_text(f"requirepass {PASSWORD}\nbind 127.0.0.1\nport {redis_port}\ndir {tmp_path}\n")
    (tmp_path / "recipe.yaml").write_text(f"extends: laptop\nserve: {{port: {port}, prefill: {{replicas: 0}}}}\n")
    model = str(trained / "runs" / "tiny" / "export")
    address, url = f"127.0.0.1:{head_port}", f"http://127.0.0.1:{port}"
    common = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "STRATA_LINK_SECRET": "secret"}
    start = [str(BIN / "ray"), "start", "--block", "--node-ip-address=127.0.0.1"]
    head_command = [*start, "--head", f"--port={head_port}", "--num-cpus=0", "--include-dashboard=false"]
    of_head = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}", "RAY_REDIS_PASSWORD": PASSWORD} | common
    head_command += [f"--redis-password={PASSWORD}"]
    # The reconnect timeout that KubeRay sets for workers of a fault-tolerant cluster.
    of_worker = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"} | common
    resources = json.dumps({"strata-decode": 1, "strata-gateway": 1})
    worker_command = [*start, f"--address={address}", "--num-cpus=2", f"--resources={resources}"]
    with process(redis, str(tmp_path / "redis.conf")), process(*head_command, f"--temp-dir={folders[0]}", **of_head) as head:
        wait_for(lambda: not ports.is_free(head_port), 60)
        with process(*worker_command, **of_worker) as worker:
            try:
                run(DEPLOY.format(address=address, recipe=str(tmp_path / "recipe.yaml"), model=model))
            except AssertionError as error:
                if psutil.STATUS_ZOMBIE in (head.status(), worker.status()):  # ended, and not yet waited for
                    raise NodeDidNotStart(str(error)) from None
                raise
            expected = complete(url)
            engines = replicas(worker, "decode")
            assert len(engines) == 1 and len(expected) > 0
            client = Client(url)
            client.start()
            time.sleep(1)
            kill_all(head)
            lost = time.monotonic()
            time.sleep(AWAY_S)
            with process(*head_command, f"--temp-dir={folders[1]}", **of_head):
                time.sleep(AWAY_S)
                client.ended.set()
                client.join()
                assert {answer for _, answer in client.answers} == {expected}
                assert sum(at > lost for at, _ in client.answers) > 5
                # Serve's new controller replaces dead replicas and leaves the others running.
                (gateway,) = replicas(worker, "gateway")
                gateway.kill()
                wait_for(lambda: complete(url) == expected, 120)
                assert replicas(worker, "decode") == engines


def replicas(node: psutil.Process, role: str) -> list[psutil.Process]:
    found = []
    for child in node.children(recursive=True):
        try:
            if f"ServeReplica:strata:{role}" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
