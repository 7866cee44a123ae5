"""Ray Train's controller in the driver. That it trains, survives lost workers and resumes is in test_training_run.py and
test_failures.py, which run through it."""

import asyncio

import pytest
import ray.train
from ray.train.torch import TorchTrainer

from strata.platform.ray_cluster import cluster
from strata.training.patches import train_controller


def test_clusters_that_grow_keep_rays_own_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "grows", lambda: False)
    assert train_controller.trainer_class() is train_controller.DriverTrainer
    monkeypatch.setattr(cluster, "grows", lambda: True)
    assert train_controller.trainer_class() is TorchTrainer


def test_helpers_of_no_use_are_not_started() -> None:
    trainer = train_controller.DriverTrainer(lambda: None, scaling_config=ray.train.ScalingConfig(num_workers=2))
    names = {type(callback).__name__ for callback in trainer._create_default_callbacks()}
    assert "BackendSetupCallback" in names
    assert not names & {"DatasetsCallback", "PlacementGroupCleanerCallback"}


def test_it_ends_with_its_cluster() -> None:
    """Else it would start workers on the next cluster of the same process."""
    abandoned = object.__new__(train_controller._Controller)
    abandoned._cluster = "the job of a cluster that is gone"
    with pytest.raises(ConnectionError, match="cluster of this run is gone"):
        asyncio.run(abandoned._run_control_loop_iteration())
