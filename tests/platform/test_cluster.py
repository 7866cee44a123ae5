"""Real Ray clusters: ours, and one that is not ours and must survive us."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from listening import reachable_from_outside

from strata.platform import cluster
from strata.platform.errors import UserError

# Runs in a process of its own: a driver connects to one cluster in its life.
SQUARE = """
import json, ray
from strata.platform import cluster
with cluster.connected(cpus={cpus}) as ends_with_us:
    answer = ray.get(ray.remote(lambda x: x * x).remote(7))
    print(json.dumps([answer, ends_with_us, ray.get_runtime_context().gcs_address, ray.cluster_resources()["CPU"]]))
"""


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


@pytest.mark.parametrize(("host", "only_there"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_cluster_that_listens_on_loopback_only_is_told_apart(
    host: str, only_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", True)  # as in a process that has had no cluster
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        assert cluster._only_on_loopback(f"127.0.0.1:{port}") == only_there
        assert not cluster._only_on_loopback(f"192.0.2.77:{port}") and not cluster._only_on_loopback("auto")
