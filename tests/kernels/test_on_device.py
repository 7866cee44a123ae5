"""Kernels run on the GPU of their tensors. Device switches are recorded, because CI has no second GPU."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import strata.kernels
from strata.kernels.ops.on_device import on_tensor_device


@pytest.mark.parametrize(("index", "switches"), [(0, []), (1, ["cuda:1"])])
def test_switches_to_the_gpu_of_the_tensor(index: int, switches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        recorded.append(str(which))
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor = SimpleNamespace(device=torch.device("cuda", index), is_cuda=True)
    assert on_tensor_device(lambda first, second, third=3: (first is tensor, second, third))(tensor, 2) == (True, 2, 3)
    assert recorded == switches


def test_meta_tensor_needs_no_gpu() -> None:
    assert on_tensor_device(lambda first: first.shape)(torch.empty(3, device="meta")) == (3,)


def test_every_cuda_implementation_is_wrapped() -> None:
    files = Path(strata.kernels.__path__[0], "ops").rglob("*.py")
    registered = [
        line for file in files for line in re.findall(r"^ *_?library\.impl\(.*\"CUDA\"\)$", file.read_text(), re.MULTILINE)
    ]
    assert len(registered) == 17 and all("on_tensor_device(" in line for line in registered)
