"""Runs on several Ray nodes of which one flips bits or is slow: it is named and excluded, and the losses are the right ones.

Nodes are raylets of one machine with one CPU each.
"""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import CORRUPTED, SLOW, Excluded, Node
from strata.platform.runs import Run
from strata.training.memory_copies import folders
from strata.training.metrics import records

from ..conftest import SMALL, strata_process
from ..failures.test_failures import losses_of, wait_until
from ..memory_copies.test_nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long, pytest.mark.timeout(1200)]

PLANTED = Path(__file__).parent / "planted"
STEPS, PLANT_AT, TIMEOUT_S, TOLERANCE = 120, 12, 300, 1e-4
SETTINGS = (
    *(*SMALL, f"train.steps={STEPS}", "train.batch=6", f"train.eval_every={STEPS}", "train.checkpoint_every=10"),
    *("train.watchdog.check_every=1", "train.watchdog.replace_stragglers=true", "parallel.workers=3"),
)


class Cluster:
    """Three nodes, the second of which has a fault from the moment at which `plant` is called."""

    def __init__(self, folder: Path, fault: str) -> None:
        self._flag, self.nodes = folder / "planted", Nodes(folder / "memory")
        path = os.pathsep.join(filter(None, (str(PLANTED), os.environ.get("PYTHONPATH"))))
        self.nodes.add("first")
        self.nodes.add("second", PYTHONPATH=path, STRATA_PLANTED=fault, STRATA_PLANTED_AT=str(self._flag))
        self.nodes.add("third")
        self.bad = self.nodes.node_id("second")

    def plant(self) -> None:
        self._flag.touch()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the user may have a token, which this cluster does not use
    found = Cluster(tmp_path, request.param)
    monkeypatch.setenv(folders.ROOT, str(found.nodes.memory("first")))  # the driver is on the first node
    yield found
    found.nodes.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[tuple[int, float]]:
    """Losses of an undisturbed run."""
    home = tmp_path_factory.mktemp("undisturbed")
    process = strata_process(home, "train", "--run", "undisturbed", *SETTINGS, f"data.path={corpus}")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    return losses_of(Run(home / "runs" / "undisturbed"))


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Waits for a condition of a run that has not ended."""
    wait_until(lambda: condition() or process.poll() is not None, timeout=TIMEOUT_S)
    assert process.poll() is None, process.communicate()[0]


def started(run: Run) -> list[tuple[int, str]]:
    """Step and source of each start of the workers."""
    lines = [line.split() for line in (run.path / "starts").read_text().splitlines()]
    return [(int(step), source) for step, source in lines]


@pytest.mark.parametrize(("cluster", "kind"), [("bit", CORRUPTED), ("slow", SLOW)], indirect=["cluster"])
def test_suspect_node_is_replaced_by_a_spare(
    cluster: Cluster, kind: str, home: Path, corpus: Path, expected: list[tuple[int, float]]
) -> None:
    cluster.nodes.add("spare")
    run = Run(home / "runs" / "disturbed")
    process = strata_process(home, "train", "--run", run.name, *SETTINGS, f"data.path={corpus}", address=cluster.nodes.address)
    until(process, run.has_state)
    spare = cluster.nodes.node_id("spare")
    excluded_nodes.add(run.path, Excluded(Node(spare, socket.gethostname(), ""), SLOW, "The other nodes are tested.", 0.0))
    until(process, lambda: records.last_step(run.metrics) >= PLANT_AT)
    first = (run.path / "nodes").read_text().split()
    assert cluster.bad in first and spare not in first
    excluded_nodes.path(run.path, spare).unlink()  # readmitted
    cluster.plant()
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    found = excluded_nodes.read(run.path)
    assert [(one.node.id, one.kind) for one in found] == [(cluster.bad, kind)], output
    assert f"Ray node {cluster.bad[:8]}) is excluded from this run: {kind}" in " ".join(output.split())
    assert set((run.path / "nodes").read_text().split()) == {cluster.nodes.node_id(name) for name in ("first", "third", "spare")}
    assert len(started(run)) == 2 and started(run)[1][1] == ("checkpoint" if kind == CORRUPTED else "memory")
    assert losses_of(run) == expected


@pytest.mark.parametrize("cluster", ["bit"], indirect=True)
def test_without_a_spare_the_run_ends_and_a_resumed_run_knows_the_node(
    cluster: Cluster, home: Path, corpus: Path, expected: list[tuple[int, float]]
) -> None:
    run = Run(home / "runs" / "disturbed")
    process = strata_process(home, "train", "--run", run.name, *SETTINGS, f"data.path={corpus}", address=cluster.nodes.address)
    until(process, lambda: records.last_step(run.metrics) >= PLANT_AT)
    cluster.plant()
    output, _ = process.communicate(timeout=TIMEOUT_S)
    words = " ".join(output.split())
    assert process.returncode == 1 and "Traceback" not in words, output
    assert "free resources for 2 of 3 workers" in words and f"Ray node {cluster.bad[:8]}) is excluded" in words
    cluster.nodes.add("spare")
    process = strata_process(home, "train", "--resume", run.name, address=cluster.nodes.address)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert cluster.bad not in (run.path / "nodes").read_text().split()
    assert losses_of(run) == expected


@pytest.mark.parametrize("cluster", ["bit"], indirect=True)
def test_elastic_run_continues_on_fewer_workers(
    cluster: Cluster, home: Path, corpus: Path, expected: list[tuple[int, float]]
) -> None:
    run = Run(home / "runs" / "disturbed")
    settings = [*SETTINGS, f"data.path={corpus}", "parallel.workers=2..3", "train.max_failures=0"]
    process = strata_process(home, "train", "--run", run.name, *settings, address=cluster.nodes.address)
    until(process, lambda: records.last_step(run.metrics) >= PLANT_AT)
    cluster.plant()
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert f"Ray node {cluster.bad[:8]}) is excluded" in " ".join(output.split()) and "Continues on 2 workers" in output
    history = records.read(run.metrics)
    assert history[-1]["workers"] == 2 and cluster.bad not in (run.path / "nodes").read_text().split()
    assert [record["step"] for record in history] == [step for step, _ in expected]
    for record, (step, loss) in zip(history, expected, strict=True):
        assert record["loss"] == pytest.approx(loss, abs=TOLERANCE), step
