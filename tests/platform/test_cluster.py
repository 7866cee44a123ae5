"""Real Ray clusters: ours, and one that is not ours and must survive us."""

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

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.ray_cluster import cluster, gcs

# Runs in a process of its own: a driver connects to one cluster in its life.
SQUARE = """
import json, ray
from strata.platform.ray_cluster import cluster, gcs
with cluster.connected(cpus={cpus}) as ends_with_us:
    answer = ray.get(ray.remote(lambda x: x * x).remote(7))
    print(json.dumps([answer, ends_with_us, ray.get_runtime_context().gcs_address, ray.cluster_resources()["CPU"]]))
"""


def test_two_commands_at_once_start_one_cluster(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    me, started = psutil.Process(), []

    def slow(cpus: int | None, dashboard: bool) -> cluster.Kept:
        started.append(cpus)
        time.sleep(0.5)
        kept = cluster.Kept("127.0.0.1:6379", me.pid, me.create_time(), None)
        write_atomic(own_home / ".strata" / "cluster.json", json.dumps(asdict(kept)))
        return kept

    monkeypatch.setattr(cluster, "_start", slow)
    with ThreadPoolExecutor(3) as commands:
        found = list(commands.map(lambda _: cluster.start(), range(3)))
    assert len(started) == 1 and len(set(found)) == 1


def drive(cpus: int = 1, **environment: str) -> list[object]:
    command = [sys.executable, "-c", SQUARE.format(cpus=cpus)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def kept() -> Iterator[cluster.Kept]:
    kept = cluster.start(cpus=3)
    yield kept
    cluster.stop()


def test_kept_cluster_is_joined_found_and_stopped(kept: cluster.Kept) -> None:
    assert cluster.find() == kept == cluster.start()
    assert drive() == [49, False, kept.address, 3.0]
    processes = psutil.Process(kept.pid).children(recursive=True)
    assert processes
    assert reachable_from_outside(psutil.Process(kept.pid)) == []
    # Without its record it is a stranger's: RAY_ADDRESS joins it, and leaving does not end it.
    stranger = {"STRATA_HOME": os.environ["STRATA_HOME"] + "/elsewhere"}
    assert drive(RAY_ADDRESS=kept.address, **stranger) == [49, False, kept.address, 3.0]
    own = drive(cpus=5, **stranger)
    assert own[:2] == [49, True] and own[2] != kept.address and own[3] == 5.0
    assert cluster.find() == kept
    assert cluster.stop() and not cluster.stop()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def test_killing_the_keeper_ends_its_cluster(kept: cluster.Kept) -> None:
    processes = psutil.Process(kept.pid).children(recursive=True)
    agents = [p for p in processes if p.name().startswith(("ray::DashboardA", "ray::RuntimeEnv"))]  # these take a minute
    psutil.Process(kept.pid).kill()
    _, alive = psutil.wait_procs([p for p in processes if p not in agents], timeout=20)
    assert not alive
    assert cluster.find() is None


def test_an_address_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"Nothing answers at 127.0.0.1:1[\s\S]*Unset RAY_ADDRESS"), cluster.connected(1):
        pass


# Also in a process of its own: it kills the GCS of the cluster that it started.
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
        assert ray.util.list_named_actors() == ["counter"]  # a question to the GCS
        counts.append(ray.get(counter.next.remote(), timeout=60))
    print(json.dumps(counts))
"""


def test_the_gcs_of_our_cluster_is_restarted_with_all_it_knew() -> None:
    done = subprocess.run([sys.executable, "-c", KILL_GCS], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1, 2, 3]
    assert done.stderr.count("Ray's GCS ended by signal 9; it was started again from its store.") == 2


def test_a_store_is_removed_with_its_cluster_and_a_left_one_at_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "gcs-left"
    left.mkdir()
    (left / "held").touch()
    with gcs.store(tmp_path) as first:
        assert not left.exists()
        with gcs.store(tmp_path) as second:
            assert Path(first["gcs_storage_path"]).is_dir() and Path(second["gcs_storage_path"]).is_dir()
    assert not list(tmp_path.iterdir())


def test_a_cluster_leaves_the_environment_as_it_was() -> None:
    """A Ray cluster that this process starts or joins later is none of ours: with our switch it could have no second node."""
    from ray._private import ray_constants

    names = (ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "VLLM_HOST_IP")

    def state() -> list[object]:
        return [ray_constants.ENABLE_RAY_CLUSTER, *map(os.environ.get, names)]

    before = state()
    with cluster.connected(1):
        assert all(os.environ[name] for name in names) and not ray_constants.ENABLE_RAY_CLUSTER
    assert state() == before


@pytest.mark.parametrize(("host", "only_there"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_cluster_that_listens_on_loopback_only_is_told_apart(
    host: str, only_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", True)  # as in a process that has had no cluster
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        assert cluster._only_on_loopback(f"127.0.0.1:{port}") == only_there
        assert not cluster._only_on_loopback(f"192.0.2.77:{port}") and not cluster._only_on_loopback("auto")
