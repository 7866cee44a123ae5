"""Free resources and drain notices of nodes. `tests/training/elastic/test_multi_node.py` reads them from a real cluster."""

import inspect

import pytest
from ray._private import state

from strata.training.patches import node_state


def test_nodes_still_lack_free_resources_and_drain_notices() -> None:
    """Fails when `ray.nodes()` has them: the patch is no longer needed."""
    source = inspect.getsource(state.GlobalState.node_table)
    assert "vailable" not in source and "rain" not in source


def test_both_are_read_from_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.GlobalState, "available_resources_per_node", lambda _: {"a": {"CPU": 2.0}})
    monkeypatch.setattr(state.GlobalState, "get_draining_nodes", lambda _: {"b": 0})
    assert node_state.free_resources() == {"a": {"CPU": 2.0}} and node_state.draining() == {"b"}
