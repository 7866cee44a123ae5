"""Real Ray clusters: in the background, for one command, and foreign clusters that must survive Strata."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from listening import reachable_from_outside
from typer.testing import CliRunner

from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.ray_cluster import cluster, gcs

pytestmark = pytest.mark.slow

# Runs in its own process: a driver connects to only one cluster in its lifetime.
SQUARE = """
import json, ray
from strata.platform.ray_cluster import cluster
with cluster.connected(cpus={cpus}) as ends_with_us:
    answer = ray.get(ray.remote(lambda x: x * x).remote(7))
    print(json.dumps([answer, ends_with_us, ray.get_runtime_context().gcs_address, ray.cluster_resources()["CPU"]]))
"""


def test_concurrent_commands_start_one_cluster(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    me, started = psutil.Process(), []

    def slow(cpus: int | None, dashboard: bool) -> cluster.BackgroundCluster:
        started.append(cpus)
        time.sleep(0.5)
        background = cluster.BackgroundCluster("127.0.0.1:6379", me.pid, me.create_time(), None)
        write_atomic(own_home / ".strata" / "cluster.json", json.dumps(asdict(background)))
        return background

    monkeypatch.setattr(cluster, "_start", slow)
    with ThreadPoolExecutor(3) as commands:
        found = list(commands.map(lambda _: cluster.start(), range(3)))
    assert len(started) == 1 and len(set(found)) == 1


def cluster_command(name: str) -> str:
    done = CliRunner().invoke(build(), ["cluster", name])
    assert done.exit_code == 0, done.output or done.exception
    return done.stdout


def test_status_without_a_cluster() -> None:
    assert cluster_command("status") == cluster_command("stop") == "No background Ray cluster is running.\n"


def test_status_does_not_list_a_dead_cluster(own_home: Path) -> None:
    """The process id of its record may belong to another process by now."""
    me = psutil.Process()
    background = cluster.BackgroundCluster("127.0.0.1:6379", me.pid, me.create_time(), None)
    record = own_home / ".strata" / "cluster.json"
    write_atomic(record, json.dumps(asdict(background)))
    assert cluster_command("status") == f"Ray at 127.0.0.1:6379 (process {me.pid})\n"
    write_atomic(record, json.dumps(asdict(background) | {"pid_created": me.create_time() - 5}))
    assert cluster_command("status") == "No background Ray cluster is running.\n" and not record.exists()


def drive(cpus: int = 1, **environment: str) -> list[object]:
    command = [sys.executable, "-c", SQUARE.format(cpus=cpus)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def background() -> Iterator[cluster.BackgroundCluster]:
    background = cluster.start(cpus=3)
    yield background
    cluster.stop()


def test_background_cluster_is_joined_found_and_stopped(background: cluster.BackgroundCluster) -> None:
    assert cluster.find() == background == cluster.start()
    assert cluster_command("status") == f"Ray at {background.address} (process {background.pid})\n"
    assert drive() == [49, False, background.address, 3.0]
    processes = psutil.Process(background.pid).children(recursive=True)
    assert processes
    assert reachable_from_outside(psutil.Process(background.pid)) == []
    # Without its record it is a foreign cluster: RAY_ADDRESS joins it, and leaving does not stop it.
    foreign = {"STRATA_HOME": os.environ["STRATA_HOME"] + "/elsewhere"}
    assert drive(RAY_ADDRESS=background.address, **foreign) == [49, False, background.address, 3.0]
    own = drive(cpus=5, **foreign)
    assert own[:2] == [49, True] and own[2] != background.address and own[3] == 5.0
    assert cluster.find() == background
    assert [cluster_command(name) for name in ("stop", "stop", "status")] == [
        "Stopped.\n",
        "No background Ray cluster is running.\n",
        "No background Ray cluster is running.\n",
    ]
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def is_agent(process: psutil.Process) -> bool:
    """True for Ray's agents, which name their processes only when they have imported."""
    titles, files = ("ray::DashboardA", "ray::RuntimeEnv"), ("dashboard/agent.py", "agent/main.py")
    return process.name().startswith(titles) or any(word.endswith(files) for word in process.cmdline())


def test_killing_the_owner_ends_the_background_cluster(background: cluster.BackgroundCluster) -> None:
    processes = psutil.Process(background.pid).children(recursive=True)
    agents = [p for p in processes if is_agent(p)]  # these need a minute
    psutil.Process(background.pid).kill()
    _, alive = psutil.wait_procs([p for p in processes if p not in agents], timeout=20)
    assert not alive
    assert cluster.find() is None


def test_address_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"No Ray cluster answers at 127.0.0.1:1[\s\S]*unset it"), cluster.connected(1):
        pass


# Imported by every Python process. The agents of a node start as slowly as on a very busy machine.
SLOW_AGENTS = """
import sys, time
if any(word.endswith(("dashboard/agent.py", "agent/main.py")) for word in sys.orig_argv):
    time.sleep(25)
"""


def test_slow_agents_do_not_end_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert drive(PYTHONPATH=path)[0] == 49


# Also in its own process: it kills the GCS of the cluster that it started.
KILL_GCS = """
import json, os, signal, time, ray
from ray._private import worker
from strata.platform.ray_cluster import cluster

@ray.remote
class Counter:
    def __init__(self): self.count = 0
    def next(self): self.count += 1; return self.count

with cluster.connected(cpus=1):
    counter = Counter.options(name="counter", lifetime="detached").remote()
    counts = [ray.get(counter.next.remote())]
    for _ in range(2):
        gcs = worker._global_node.all_processes["gcs_server"][0].process
        os.kill(gcs.pid, signal.SIGKILL)
        gcs.wait()
        assert ray.util.list_named_actors() == ["counter"]  # a request to the GCS
        counts.append(ray.get(counter.next.remote(), timeout=60))
    print(json.dumps(counts))
"""


def test_gcs_is_restarted_with_its_state() -> None:
    done = subprocess.run([sys.executable, "-c", KILL_GCS], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1, 2, 3]
    assert done.stderr.count("Ray's GCS ended by signal 9; it was restarted from its store.") == 2


def test_store_is_removed_with_its_cluster_and_a_leftover_at_the_next_start(tmp_path: Path) -> None:
    leftover = tmp_path / "gcs-leftover"
    leftover.mkdir()
    (leftover / "held").touch()
    with gcs.store(tmp_path) as first:
        assert not leftover.exists()
        with gcs.store(tmp_path) as second:
            assert Path(first["gcs_storage_path"]).is_dir() and Path(second["gcs_storage_path"]).is_dir()
    assert not list(tmp_path.iterdir())


def test_cluster_restores_the_environment() -> None:
    """The process may later start or join another Ray cluster, which could have no second node with this setting."""
    from ray._private import ray_constants

    names = (ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "VLLM_HOST_IP")

    def state() -> list[object]:
        return [ray_constants.ENABLE_RAY_CLUSTER, *map(os.environ.get, names)]

    before = state()
    with cluster.connected(1):
        assert all(os.environ[name] for name in names) and not ray_constants.ENABLE_RAY_CLUSTER
    assert state() == before


@pytest.mark.parametrize(("host", "only_there"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_cluster_that_listens_on_loopback_only_is_recognized(
    host: str, only_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", True)  # as in a process that never had a cluster
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        assert cluster._only_on_loopback(f"127.0.0.1:{port}") == only_there
        assert not cluster._only_on_loopback(f"192.0.2.77:{port}") and not cluster._only_on_loopback("auto")
