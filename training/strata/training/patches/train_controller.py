"""Runs Ray Train's controller in the driver process, for a faster start.

Written for: Ray 2.60 (`ray/train/v2`).
Reason: Ray Train starts five processes besides the workers, each of which imports Ray Train for 3 to 6 CPU seconds: the
controller, and helpers for Ray Data, for an autoscaler, for placement groups that outlive their controller, and for
synchronization. The driver waits for the training anyway, so it can be the controller. Placement groups end with it, and
Strata does not use Ray Data. Autoscaling clusters use Ray's own controller, which sends resource requests to the autoscaler.
Delete when: Ray's trainers have an option to run the controller in the driver without these helpers.
"""

import asyncio
import logging
import os
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.worker import Worker

from strata.platform.ray_cluster import cluster


def trainer_class() -> type[TorchTrainer]:
    return TorchTrainer if cluster.grows() or ray.util.client.ray.is_connected() else DriverTrainer


class DriverTrainer(TorchTrainer):  # type: ignore[misc]
    def _create_default_callbacks(self) -> list[Any]:
        omitted = (DatasetsCallback, PlacementGroupCleanerCallback)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, omitted)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # The controller would log to the user's console, between Strata's own lines. Errors are raised.
        os.environ.setdefault("RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING", "0")
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        controller = _Controller(**arguments | {"scaling_policy": _NoAutoscaler(self.scaling_config)})
        asyncio.run(controller.run())
        return controller.get_result()


class _WorkerGroup(WorkerGroup):  # type: ignore[misc]
    def _init_train_context_on_workers(self, workers: list[Worker], sync_actor: Any, train_context_args: dict[str, Any]) -> None:
        """Ray's method without the controller's actor handle, which only `get_all_reported_checkpoints` uses."""
        calls = [
            worker.actor.init_train_context.remote(
                train_run_context=self._train_run_context,
                distributed_context=worker.distributed_context,
                synchronization_actor=sync_actor,
                storage_context=self._storage_context,
                worker_callbacks=self._worker_callbacks_to_propagate,
                controller_actor=None,
                **{name: values[number] for name, values in train_context_args.items()},
            )
            for number, worker in enumerate(workers)
        ]
        ray.get(calls)
        self._decorate_worker_log_file_paths(workers)


class _Controller(TrainController):  # type: ignore[misc]
    worker_group_cls = _WorkerGroup

    def __init__(self, **arguments: Any) -> None:
        self._cluster = ray.get_runtime_context().get_job_id()
        super().__init__(**arguments)

    async def _run_control_loop_iteration(self) -> None:
        """Raises when the cluster is gone. An actor would die with its cluster; this controller would start workers on the next
        cluster of this process."""
        if not ray.is_initialized() or self._cluster != ray.get_runtime_context().get_job_id():
            raise ConnectionError("The Ray cluster of this run is gone.")
        await super()._run_control_loop_iteration()


class _NoAutoscaler(FixedScalingPolicy):  # type: ignore[misc]
    """Scaling policy that sends no resource requests to an autoscaler."""

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        self._requester_id = f"train-{train_run_context.run_id}"

    def _maybe_send_resource_request(self) -> None:
        """Sends nothing."""
