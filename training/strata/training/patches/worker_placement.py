"""Selects the nodes of the workers anew at each start.

Written for: Ray 2.60 (`ray/train/v2/_internal/execution/callback.py`).
Reason: `ScalingConfig.label_selector` is fixed for all starts of a run. Nodes that become suspect while it runs have to be
avoided by the next start. The hook of Ray's callback class is a developer API without a public import path.
Delete when: Ray Train exports `ControllerCallback`, or reads a label selector at each start.
"""

from collections.abc import Callable
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback


class WorkerPlacement(ControllerCallback):  # type: ignore[misc]
    """`selector` returns the label selector for a number of workers. It runs in the process of the controller."""

    def __init__(self, selector: Callable[[int], dict[str, str] | None]) -> None:
        self._selector = selector

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        return self._selector(num_workers)
