"""Calls a function on each worker before torch's process group exists.

Written for: Ray 2.60 (`ray/train/torch/config.py`).
Reason: Ray Train runs no code of the user on a worker before it sets up the process group. Variables that torch's constructor
reads, and the capture of what a failing setup prints, come too late in the training function.
Delete when: Ray Train has a public callback on workers before the backend's setup.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch.config import TorchConfig, _TorchBackend

LIMIT_S = 300.0


def _call(on_worker: Callable[[int], None], rank: int) -> None:
    """Runs on a worker. Ray Train names its calls by the function's name, which a partial function does not have."""
    on_worker(rank)


class StartBackend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: "StartConfig") -> None:
        if backend_config.each_start is not None:
            on_worker = backend_config.each_start()
            ranks = range(len(worker_group))
            calls = [worker_group.execute_single_async(rank, _call, on_worker, rank) for rank in ranks]
            ray.get(calls, timeout=LIMIT_S)  # raises, and the workers are started again
        self.set_up(worker_group, backend_config)

    def set_up(self, worker_group: Any, backend_config: "StartConfig") -> None:
        super().on_start(worker_group, backend_config)


@dataclass
class StartConfig(TorchConfig):  # type: ignore[misc]
    """`each_start` runs where the controller runs, once per start of the workers, and returns the function of a rank that runs on
    each worker."""

    each_start: Callable[[], Callable[[int], None]] | None = None

    @property
    def backend_cls(self) -> type[StartBackend]:
        return StartBackend
