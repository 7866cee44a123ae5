"""Decisions about Ray clusters, with stand-ins for Ray and for sockets."""

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from strata.platform.errors import UserError
from strata.platform.processes import environment
from strata.platform.ray_cluster import cluster, gcs, local_ray, watch

# Lost nodes


def node(address: str, cpus: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Resources": {"CPU": cpus} if cpus else {}}


def test_lost_and_joined_nodes() -> None:
    a, b, c, d = node("10.0.0.1", 4), node("10.0.0.2", 8), node("10.0.0.3", 2.5), node("10.0.0.4", 0)
    assert watch.changes({}, {"a": a}) == [], "nothing to compare with"
    assert watch.changes({"a": a}, {"a": a}) == []
    assert watch.changes({"a": a, "b": b, "d": d}, {"a": a, "c": c, "d": d}) == [
        "Ray node 10.0.0.2 was lost; 3 are left, with 6.5 CPUs.",
        "Ray node 10.0.0.3 has joined.",
    ]


# Death of a cluster


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    return now


def watched(ours: bool) -> watch.ClusterWatch:
    """A watch without its thread."""
    made = watch.ClusterWatch.__new__(watch.ClusterWatch)
    made._ours, made._address = ours, "10.0.0.1:6379"
    made._answered = made._gcs_seen = time.monotonic()
    return made


@pytest.mark.parametrize(("after", "dead"), [(10.0, False), (10.5, True)])
def test_a_silent_cluster_is_dead_after_ten_seconds(clock: SimpleNamespace, after: float, dead: bool) -> None:
    other = watched(ours=False)
    clock.s += after
    assert other.death() == ("The Ray cluster at 10.0.0.1:6379 has not answered for 10 s." if dead else None)


def test_our_raylet_is_dead_immediately_and_our_gcs_after_ten_seconds(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, dead = watched(ours=True), SimpleNamespace(part=None)
    monkeypatch.setattr(watch, "dead_part", lambda: dead.part)
    clock.s += 100
    assert mine.death() is None, "our cluster needs no answers"
    dead.part = "gcs_server"
    clock.s += 10
    assert mine.death() is None, "it may be restarting"
    clock.s += 0.5
    assert mine.death() == "Ray's control service (GCS) on this machine has died."
    dead.part = None
    assert mine.death() is None
    dead.part = "gcs_server"
    clock.s += 10
    assert mine.death() is None, "counted from the last time it ran"
    dead.part = "raylet"
    assert mine.death() == "Ray's node service (raylet) on this machine has died."


def test_another_cluster_ignores_our_processes(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "dead_part", lambda: "raylet")
    assert watched(ours=False).death() is None


def test_cluster_addresses_that_accept_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert watch._accepts(f"127.0.0.1:{port}")
        assert cluster._answers(f"127.0.0.1:{port}") and cluster._answers(f"ray://127.0.0.1:{port}")
    assert not watch._accepts(f"127.0.0.1:{port}")
    assert not cluster._answers(f"127.0.0.1:{port}")
    assert cluster._answers("auto") and cluster._answers("host:name"), "names are left to Ray"


# Restarts of the GCS


class Node:
    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.fails = fails

    def kill_gcs_server(self, check_alive: bool) -> None:
        self.calls.append(f"kill {check_alive}")

    def start_gcs_server(self) -> None:
        if self.fails:
            raise RuntimeError("no disk")
        self.calls.append("start")


def test_the_gcs_is_restarted_five_times_within_a_minute(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    node = Node()
    supervisor = gcs._Supervisor(node)
    for _ in range(5):
        clock.s += 10
        assert supervisor._restart(-9)
    assert node.calls == ["kill False", "start"] * 5
    clock.s += 19.5  # 59.5 s after the first
    assert not supervisor._restart(3)
    printed = capsys.readouterr().err.splitlines()
    assert printed[:5] == ["Ray's GCS ended by signal 9; it was restarted from its store."] * 5
    assert printed[5] == "Ray's GCS ended with exit code 3, 6 times within a minute; it is not restarted."
    clock.s += 0.5
    assert supervisor._restart(0), "a minute after the first"


def test_a_gcs_that_does_not_start_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert not gcs._Supervisor(Node(fails=True))._restart(1)
    assert capsys.readouterr().err == "Ray's GCS ended with exit code 1 and could not be restarted: no disk\n"


def test_a_store_is_removed_at_the_end_and_a_locked_one_is_left(tmp_path: Path) -> None:
    (tmp_path / "gcs-old").mkdir()
    (tmp_path / "gcs-old" / "held").touch()
    (tmp_path / "gcs-new").mkdir()
    (tmp_path / "other").mkdir()
    with gcs.store(tmp_path) as first, gcs.store(tmp_path) as second:
        assert first["gcs_storage"] == "rocksdb"
        folders = {Path(each["gcs_storage_path"]) for each in (first, second)}
        assert set(tmp_path.iterdir()) == {*folders, tmp_path / "gcs-new", tmp_path / "other"}
    assert {path.name for path in tmp_path.iterdir()} == {"gcs-new", "other"}


# Options of a local cluster


@pytest.mark.parametrize(("cores", "cpus", "offered"), [(4, 2, 4), (4, 9, 9), (4, None, 4), (None, None, 1), (None, 3, 3)])
def test_a_local_cluster_offers_the_cores_or_more(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, cpus: int | None, offered: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    options = local_ray._options(cpus, dashboard=True)
    assert (options["num_cpus"], options["include_dashboard"], options["address"]) == (offered, True, "local")
    assert (options["log_to_driver"], options["object_store_memory"]) == (False, 256 * 1024 * 1024)
    assert len(options["_temp_dir"]) < 40


@pytest.mark.parametrize(
    ("cores", "cpus", "spare", "offered"), [(4, 2, 0, 4), (4, 6, 0, 6), (4, 6, 3, 9), (4, 2, 3, 7), (None, 1, 2, 3)]
)
def test_a_new_cluster_has_spare_cpus(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, cpus: int, spare: int, offered: int
) -> None:
    started = []

    def running(cpus: int, dashboard: bool) -> Any:
        started.append((cpus, dashboard))
        return environment({})

    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(local_ray, "running", running)
    with cluster.connected(cpus, spare) as ends:
        assert ends is True
    assert started == [(offered, False)]


def test_workers_use_loopback_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"eth0": [SimpleNamespace(address="10.0.0.1")], "lo0": [SimpleNamespace(address="127.0.0.1")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    for name in ("GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "VLLM_HOST_IP", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert local_ray._worker_environment() == {
        "GLOO_SOCKET_IFNAME": "lo0",
        "UCX_NET_DEVICES": "lo0",
        "VLLM_HOST_IP": "127.0.0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }


# The background cluster


def test_a_background_cluster_is_found_while_its_owner_lives(own_home: Path) -> None:
    assert cluster.find() is None and cluster.stop() is False
    me = psutil.Process()
    record = own_home / ".strata" / "cluster.json"
    record.parent.mkdir()
    text = '{"address": "127.0.0.1:1", "pid": %d, "pid_created": %f, "dashboard": null}'
    record.write_text(text % (me.pid, me.create_time()))
    found = cluster.find()
    assert found and (found.address, found.pid) == ("127.0.0.1:1", me.pid)
    assert cluster.start() == found, "a second one is not started"
    record.write_text(text % (me.pid, me.create_time() - 100))
    assert cluster.find() is None and not record.exists()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_kuberay_adds_nodes(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_KUBERAY_IN_USE", raising=False)
    if value:
        monkeypatch.setenv("RAY_USAGE_STATS_KUBERAY_IN_USE", value)
    assert cluster.grows() is expected


def test_a_dead_cluster_may_name_its_run() -> None:
    died = watch.ClusterDied("It died.", "Resume.", "mine")
    assert isinstance(died, UserError) and (died.cause, died.fix, died.run) == ("It died.", "Resume.", "mine")
    assert watch.ClusterDied("It died.", "Resume.").run is None


def test_a_missing_background_cluster_is_started(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    started = cluster.BackgroundCluster("127.0.0.1:1", 1, 1.0, None)
    calls: list[Any] = []
    monkeypatch.setattr(cluster, "_start", lambda *given: calls.append(given) or started)
    assert cluster.start(3, dashboard=True) is started and calls == [(3, True)]
    assert (own_home / ".strata" / "cluster.lock").exists()


class Owner:
    """Stand-in for the process that owns a background cluster."""

    def __init__(self, code: int | None) -> None:
        self.code, self.killed = code, False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True


def test_a_start_waits_for_the_record_of_the_owner(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, clock: SimpleNamespace
) -> None:
    (own_home / ".strata").mkdir()
    owner, options = Owner(None), {}
    there = cluster.BackgroundCluster("127.0.0.1:1", 1, 1.0, None)
    found = iter([None, None, there])
    monkeypatch.setattr(cluster.subprocess, "Popen", lambda command, **given: options.update(given) or owner)
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: setattr(clock, "s", clock.s + seconds))
    monkeypatch.setattr(cluster, "find", lambda: next(found))
    assert cluster._start(2, False) is there and not owner.killed
    assert options["start_new_session"] is True, "Ctrl-C must not reach the cluster"


@pytest.mark.parametrize(("code", "waits"), [(1, 0.0), (None, 240.0)])
def test_a_start_fails_if_the_owner_ends_or_is_silent(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, clock: SimpleNamespace, code: int | None, waits: float
) -> None:
    log, owner, before = own_home / ".strata" / "cluster.log", Owner(code), clock.s
    log.parent.mkdir()

    def popen(command: list[str], **_: Any) -> Owner:
        log.write_text(" ".join(f"w{i}" for i in range(50)))
        return owner

    monkeypatch.setattr(cluster.subprocess, "Popen", popen)
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: setattr(clock, "s", clock.s + seconds))
    with pytest.raises(UserError) as error:
        cluster._start(2, False)
    assert error.value.cause == "The local Ray cluster did not start: " + " ".join(f"w{i}" for i in range(10, 50))
    assert owner.killed and clock.s - before == pytest.approx(waits, abs=0.2)


@pytest.mark.parametrize(
    ("has", "grows", "joins"), [(4, False, True), (5, False, True), (3, False, False), (3, True, True), (5, True, True)]
)
def test_a_joined_cluster_has_enough_cpus_or_grows(monkeypatch: pytest.MonkeyPatch, has: int, grows: bool, joins: bool) -> None:
    import ray
    from ray._private.authentication import authentication_token_setup

    shut = []
    monkeypatch.setattr(cluster, "_answers", lambda _: True)
    monkeypatch.setattr(cluster, "grows", lambda: grows)
    monkeypatch.setattr(authentication_token_setup, "maybe_enable_token_auth_if_token_available", lambda **_: None)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(has)})
    monkeypatch.setattr(ray, "shutdown", lambda: shut.append(1))
    if joins:
        cluster._join("10.0.0.1:6379", 4)
        assert not shut
    else:
        with pytest.raises(UserError, match=r"at 10\.0\.0\.1:6379 has 3 CPUs; 4 are needed"):
            cluster._join("10.0.0.1:6379", 4)
        assert shut == [1]


def test_only_an_ended_gcs_is_restarted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    node, code = Node(), SimpleNamespace(value=None)
    process = SimpleNamespace(poll=lambda: code.value)
    node.all_processes = {"gcs_server": [SimpleNamespace(process=process)]}  # type: ignore[attr-defined]
    supervisor = gcs._Supervisor(node)
    assert supervisor._exit_code() is None
    code.value = -9
    assert supervisor._exit_code() == -9
    looks = iter([False, False, True])
    monkeypatch.setattr(supervisor._released, "wait", lambda _: next(looks))
    monkeypatch.setattr(gcs.threading, "Event", lambda: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(supervisor, "_restart", lambda found: node.calls.append(f"restart {found}") or True)
    supervisor.run()
    assert node.calls == ["restart -9", "restart -9"]
    code.value, looks = None, iter([False, True])
    supervisor.run()
    assert len(node.calls) == 2, "it runs"
    code.value, looks = 1, iter([False, True])
    supervisor._released.set()
    supervisor.run()
    assert len(node.calls) == 2, "released"
