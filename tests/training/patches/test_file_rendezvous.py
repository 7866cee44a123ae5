"""File rendezvous of torch's process group in place of Ray Train's TCP store."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.train.torch import TorchConfig
from ray.train.torch import config as ray_config

from strata.training.patches import file_rendezvous, worker_start

CHANGED = "Ray Train changed {}: compare it with patches/file_rendezvous.py and update the patch."


class Workers:
    """Stand-in for Ray Train's worker group that records calls."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.calls: list[tuple[int, dict[str, Any]]] = []

    def __len__(self) -> int:
        return 3

    def get_resources_per_worker(self) -> dict[str, float]:
        return {"CPU": 1, "GPU": self.gpus}

    def execute(self, function: Callable[[], None]) -> None:
        assert function is ray_config._set_torch_distributed_env_vars

    def execute_single_async(self, rank: int, function: Callable[..., None], **arguments: Any) -> None:
        assert function is ray_config._setup_torch_process_group
        inspect.signature(function).bind(**arguments)
        self.calls.append((rank, arguments))


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "nccl")])
def test_all_ranks_meet_in_one_file(monkeypatch: pytest.MonkeyPatch, gpus: int, backend: str) -> None:
    monkeypatch.setattr(ray, "get", lambda _: None)
    workers = Workers(gpus)
    file_rendezvous.FileBackend().on_start(workers, file_rendezvous.FileConfig())
    assert [(rank, call["world_rank"], call["world_size"], call["backend"]) for rank, call in workers.calls] == [
        (rank, rank, 3, backend) for rank in range(3)
    ]
    (url,) = {call["init_method"] for _, call in workers.calls}
    assert url.startswith("file:///")


def test_remote_clusters_use_rays_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert file_rendezvous.torch_config().backend_cls is file_rendezvous.FileBackend
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert file_rendezvous.torch_config().backend_cls.set_up is worker_start.StartBackend.set_up


def test_ray_sets_up_the_process_group_as_the_patch_does() -> None:
    source = inspect.getsource(ray_config._TorchBackend.on_start)
    for step in ("_set_torch_distributed_env_vars", "_setup_torch_process_group", "timeout_s=backend_config.timeout_s"):
        assert step in source, CHANGED.format("_TorchBackend.on_start")
    assert "backend_cls" in vars(TorchConfig), CHANGED.format("TorchConfig")


def test_patch_is_still_needed() -> None:
    source = inspect.getsource(ray_config._TorchBackend.on_start)
    assert "either 'env' or 'tcp'" in source and "file" not in source, (
        "TorchConfig may support a file rendezvous now. If it does, delete patches/file_rendezvous.py and use its option."
    )
