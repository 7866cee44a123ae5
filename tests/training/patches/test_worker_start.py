"""A function on each worker before torch's process group exists."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ray
from ray.train.torch import config as ray_config

from strata.training.patches import worker_start


class Workers:
    """Stand-in for Ray Train's worker group."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __len__(self) -> int:
        return 3

    def execute_single_async(self, rank: int, function: Callable[..., None], *arguments: Any) -> None:
        assert function.__name__, "Ray Train names the call by it"
        function(*arguments)


def test_each_worker_is_called_before_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda _, timeout: None)
    workers = Workers()
    monkeypatch.setattr(ray_config._TorchBackend, "on_start", lambda self, group, config: group.calls.append("set up"))
    config = worker_start.StartConfig(each_start=lambda: partial(workers.calls.append))
    config.backend_cls().on_start(workers, config)
    assert workers.calls == [0, 1, 2, "set up"]
    workers = Workers()
    worker_start.StartBackend().on_start(workers, worker_start.StartConfig())
    assert workers.calls == ["set up"]


def test_the_patch_is_still_needed() -> None:
    assert not hasattr(ray_config.TorchConfig, "each_start") and "callbacks" not in vars(ray_config.TorchConfig()), (
        "TorchConfig may have a hook on workers now. If it has, delete patches/worker_start.py and use it."
    )
