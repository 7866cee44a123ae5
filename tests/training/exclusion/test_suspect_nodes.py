"""Runs on several Ray nodes of which one flips bits or is slow: it is named and excluded, and the losses are the right ones.

Nodes are raylets of one machine with one CPU each.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import CORRUPTED, SLOW
from strata.platform.runs import Run
from strata.training.memory_copies import folders
from strata.training.metrics import records

from ..conftest import SMALL, strata_process
from ..failures.test_failures import losses_of, wait_until
from ..memory_copies.test_nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long, pytest.mark.timeout(1200)]

PLANTED = Path(__file__).parent / "planted"
STEPS, TIMEOUT_S = 1500, 500
SETTINGS = (
    *(*SMALL, f"train.steps={STEPS}", "train.batch=6", "train.eval_every=1500", "train.checkpoint_every=10"),
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


def started(run: Run) -> list[tuple[int, str]]:
    """Step and source of each start of the workers."""
    lines = [line.split() for line in (run.path / "starts").read_text().splitlines()]
    return [(int(step), source) for step, source in lines]


@pytest.mark.parametrize(("cluster", "kind"), [("bit", CORRUPTED), ("slow", SLOW)], indirect=["cluster"])
def test_suspect_node_is_replaced_by_a_spare(
    cluster: Cluster, kind: str, home: Path, corpus: Path, expected: list[tuple[int, float]]
) -> None:
    run = Run(home / "runs" / "disturbed")
    process = strata_process(home, "train", "--run", run.name, *SETTINGS, f"data.path={corpus}", address=cluster.nodes.address)
    wait_until(lambda: (run.path / "nodes").exists() or process.poll() is not None, timeout=TIMEOUT_S)
    assert cluster.bad in (run.path / "nodes").read_text().split()
    cluster.nodes.add("spare")
    wait_until(lambda: records.last_step(run.metrics) >= 15 or process.poll() is not None, timeout=TIMEOUT_S)
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
    wait_until(lambda: records.last_step(run.metrics) >= 15 or process.poll() is not None, timeout=TIMEOUT_S)
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
