"""File rendezvous of torch's process group, for runs on one machine.

Written for: Ray 2.60 (`ray/train/torch/config.py`).
Reason: in Ray Train, rank 0 opens a TCP store that listens on every interface without authentication, on a port that may no
longer be free. Ranks on one machine share a file system and need no port.
Delete when: `TorchConfig` accepts `init_method="file"` or a `file://` URL.
"""

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch.config import TorchConfig, _set_torch_distributed_env_vars, _setup_torch_process_group

from strata.platform.ray_cluster import local_ray
from strata.training.patches.worker_start import StartBackend, StartConfig


class FileBackend(StartBackend):
    def set_up(self, worker_group: Any, backend_config: TorchConfig) -> None:
        gpu = worker_group.get_resources_per_worker().get("GPU", 0) > 0
        file = local_ray.TEMP_DIR / f"rendezvous-{uuid.uuid4().hex}"
        worker_group.execute(_set_torch_distributed_env_vars)
        ranks = range(len(worker_group))
        setups = [
            worker_group.execute_single_async(
                rank,
                _setup_torch_process_group,
                backend="nccl" if gpu else "gloo",
                world_rank=rank,
                world_size=len(ranks),
                init_method=f"file://{file}",
                timeout_s=backend_config.timeout_s,
            )
            for rank in ranks
        ]
        ray.get(setups)


@dataclass
class FileConfig(StartConfig):
    @property
    def backend_cls(self) -> type[FileBackend]:
        return FileBackend


def torch_config(each_start: Callable[[], Callable[[int], None]] | None = None) -> StartConfig:
    return StartConfig(each_start=each_start) if "RAY_ADDRESS" in os.environ else FileConfig(each_start=each_start)
