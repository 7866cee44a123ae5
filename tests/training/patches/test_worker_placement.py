"""Nodes of the workers, selected at each start. `tests/training/exclusion/test_suspect_nodes.py` does so in a real cluster."""

import inspect

import ray.train
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller import TrainController

from strata.training.patches.worker_placement import WorkerPlacement


def test_the_controller_calls_the_hook_at_each_start() -> None:
    assert "on_controller_start_worker_group" in inspect.getsource(TrainController._start_worker_group)
    upstream, patched = (kind.on_controller_start_worker_group for kind in (ControllerCallback, WorkerPlacement))
    assert list(inspect.signature(upstream).parameters) == list(inspect.signature(patched).parameters)


def test_the_hook_is_still_no_public_class() -> None:
    """Fails when Ray Train exports it: the patch is no longer needed."""
    assert not hasattr(ray.train, "ControllerCallback")


def test_the_selector_has_the_number_of_workers() -> None:
    placement = WorkerPlacement(lambda workers: {"ray.io/node-id": f"!in({workers})"})
    assert placement.on_controller_start_worker_group(scaling_config=None, num_workers=3) == {"ray.io/node-id": "!in(3)"}
