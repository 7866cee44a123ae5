"""Loss of a node: its ranks' copies are on the next node, and a run continues from them on a node that has none.

Nodes are raylets of one machine, each with its own folder for copies.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.platform.runs import Run
from strata.training.memory_copies import folders
from strata.training.metrics import records

from ..conftest import SMALL, strata_process
from ..failures.test_failures import losses_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long]

SETTINGS = ("train.steps=150", "train.eval_every=100", "train.checkpoint_every=1000", "train.max_failures=10")


class Nodes:
    """Ray cluster of nodes with one CPU each."""

    def __init__(self, base: Path) -> None:
        from ray.cluster_utils import Cluster

        self._base, self._cluster, self._nodes = base, Cluster(), dict[str, Any]()

    def add(self, name: str, **more: str) -> None:
        """Starts a node, with more variables for its workers."""
        environment = {folders.ROOT: str(self.memory(name)), **more}
        self._nodes[name] = self._cluster.add_node(num_cpus=1, env_vars=environment, include_dashboard=False)

    def lose(self, name: str) -> None:
        """Kills a node's processes and empties its memory."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)
        shutil.rmtree(self.memory(name))

    def memory(self, name: str) -> Path:
        return self._base / name

    def node_id(self, name: str) -> str:
        return str(self._nodes[name].node_id)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the user may have a token, which this cluster does not use
    cluster = Nodes(tmp_path / "memory")
    cluster.add("first")
    cluster.add("second")
    yield cluster
    cluster.shutdown()


def copies_in(folder: Path) -> set[str]:
    """Ranks whose copies are in a node's memory."""
    return {path.name.split("-")[1] for path in folder.glob("*/rank-*")}


def test_run_continues_from_memory_after_the_loss_of_a_node(
    nodes: Nodes, home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SMALL, f"data.path={corpus}", *SETTINGS, "parallel.workers=2"]
    undisturbed, disturbed = (Run(home / "runs" / name) for name in ("undisturbed", "disturbed"))
    process = strata_process(home, "train", "--run", undisturbed.name, *settings)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    monkeypatch.setenv(folders.ROOT, str(nodes.memory("first")))  # the driver is on the first node
    process = strata_process(home, "train", "--run", disturbed.name, *settings, address=nodes.address)
    wait_until(lambda: records.last_step(disturbed.metrics) >= 20 or process.poll() is not None, timeout=500)
    assert process.poll() is None, process.communicate()[0]
    for name in ("first", "second"):
        assert copies_in(nodes.memory(name)) == {"00000", "00001"}, "each node has its own copy and the other's"
    nodes.lose("second")
    reached = records.last_step(disturbed.metrics)
    nodes.add("third")
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    starts = [line.split() for line in (disturbed.path / "starts").read_text().splitlines()]
    assert starts[-1][1] == "memory" and int(starts[-1][0]) >= reached - 1, (starts, reached)
    assert losses_of(disturbed) == losses_of(undisturbed)
    for name in ("first", "third"):
        assert copies_in(nodes.memory(name)) == set(), "nothing is left in memory"
