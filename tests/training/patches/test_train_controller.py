"""Ray Train's controller in the driver. Training, recovery from lost workers and resuming are covered by test_training_run.py
and test_faults.py, which use this controller."""

import ast
import asyncio
import inspect
import textwrap
from typing import Any

import pytest
import ray.train
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from strata.platform.ray_cluster import cluster
from strata.training.patches import train_controller

CHANGED = "Ray Train changed {}: compare it with patches/train_controller.py and update the patch."
NOT_NEEDED = "Ray Train no longer {}: remove that part of patches/train_controller.py."


def remote_arguments(function: Any) -> list[str | None]:
    """Keywords of the call `worker.actor.init_train_context.remote(...)`."""
    calls = [node for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))) if isinstance(node, ast.Call)]
    return next([k.arg for k in call.keywords] for call in calls if ast.unparse(call.func).endswith("init_train_context.remote"))


def test_worker_context_has_rays_arguments() -> None:
    upstream = WorkerGroup._init_train_context_on_workers
    patched = train_controller._WorkerGroup._init_train_context_on_workers
    assert remote_arguments(patched) == remote_arguments(upstream), CHANGED.format("WorkerGroup._init_train_context_on_workers")
    assert list(inspect.signature(patched).parameters) == list(inspect.signature(upstream).parameters)


def test_overridden_members_exist_upstream() -> None:
    for kind, name in (
        (TorchTrainer, "_create_default_callbacks"),
        (TorchTrainer, "_initialize_and_run_controller"),
        (TrainController, "worker_group_cls"),
        (TrainController, "_run_control_loop_iteration"),
        (FixedScalingPolicy, "after_controller_start"),
        (FixedScalingPolicy, "_maybe_send_resource_request"),
    ):
        assert hasattr(kind, name), CHANGED.format(f"{kind.__name__}.{name}")


def test_patch_is_still_needed() -> None:
    trainer = TorchTrainer(lambda: None, scaling_config=ray.train.ScalingConfig(num_workers=2))
    names = {type(callback).__name__ for callback in trainer._create_default_callbacks()}
    for helper in ("DatasetsCallback", "PlacementGroupCleanerCallback"):
        assert helper in names, NOT_NEEDED.format(f"starts {helper}")
    source = inspect.getsource(TorchTrainer._initialize_and_run_controller)
    assert "controller_actor_cls" in source, NOT_NEEDED.format("runs its controller in an actor")
    source = inspect.getsource(FixedScalingPolicy.after_controller_start)
    assert "Coordinator" in source, NOT_NEEDED.format("registers every run with an autoscaling coordinator")


def test_autoscaling_clusters_use_rays_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "grows", lambda: False)
    assert train_controller.trainer_class() is train_controller.DriverTrainer
    monkeypatch.setattr(cluster, "grows", lambda: True)
    assert train_controller.trainer_class() is TorchTrainer


def test_unused_helpers_are_not_started() -> None:
    trainer = train_controller.DriverTrainer(lambda: None, scaling_config=ray.train.ScalingConfig(num_workers=2))
    names = {type(callback).__name__ for callback in trainer._create_default_callbacks()}
    assert "BackendSetupCallback" in names
    assert not names & {"DatasetsCallback", "PlacementGroupCleanerCallback"}


def test_controller_ends_with_its_cluster() -> None:
    """Otherwise it would start workers on the next cluster of the same process."""
    abandoned = object.__new__(train_controller._Controller)
    abandoned._cluster = "job id of a stopped cluster"
    with pytest.raises(ConnectionError, match="cluster of this run is gone"):
        asyncio.run(abandoned._run_control_loop_iteration())
