"""Tensors between host and devices: copies, pinned memory, guards, serialization, random numbers."""

import copy
import io
import pickle
import time

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from strata.kernels import device

device.load()


def test_torch_knows_the_device() -> None:
    assert torch.strata.is_available() and torch.strata.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("strata")
    x = torch.ones(2, device="strata:1")
    assert x.is_strata and not torch.ones(1).is_strata and x.get_device() == 1
    assert torch.ones(2).strata().device == torch.device("strata:0")
    assert torch.strata.get_amp_supported_dtype()[0] == torch.bfloat16
    assert "host memory behind a fake device" in torch.strata.get_device_name()
    assert repr(x) == "tensor([1., 1.], device='strata:1')"
    device.load()  # once more changes nothing
    with pytest.raises(RuntimeError, match="strata:7 does not exist: there are 2 devices"):
        torch.ones(1, device="strata:7")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_copies_of_every_layout(dtype: torch.dtype) -> None:
    host = (torch.arange(24).view(4, 6) % 5).to(dtype)
    for layout in (host, host.t(), host[1:, ::2], host[:, 1:2].expand(4, 3)):
        there = layout.to("strata")
        assert there.cpu().equal(layout) and there.to("strata:1").cpu().equal(layout)
        assert there.to(torch.float64).cpu().equal(layout.to(torch.float64)) if not dtype.is_complex else True
    assert host.to("strata").t()[1:].cpu().equal(host.t()[1:]), "from a view"
    target = torch.zeros(4, 12, dtype=dtype, device="strata")
    target[:, ::2].copy_(host)
    assert target[:, ::2].cpu().equal(host) and not target[:, 1::2].cpu().any()
    target[:, ::2] = host[0]
    assert target[3, ::2].cpu().equal(host[0]), "broadcast"


def test_conjugates_and_negatives_are_resolved() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    there = x.to("strata")
    assert there.conj().cpu().equal(x.conj()) and there.conj().imag.cpu().equal(x.conj().imag)
    assert torch.view_as_real(there).cpu().equal(torch.view_as_real(x))


def test_a_copy_from_pinned_memory_does_not_block_and_outlives_its_source() -> None:
    pinned = torch.arange(1000.0).pin_memory()
    assert pinned.is_pinned() and pinned[10:].is_pinned() and not torch.ones(3).is_pinned()
    torch.ops.strata_device.sleep(0, 0.3)
    begin = time.perf_counter()
    there = pinned.to("strata", non_blocking=True)
    assert time.perf_counter() - begin < 0.2
    del pinned
    others = [torch.zeros(1000).pin_memory() for _ in range(8)]  # would reuse the memory
    assert there.cpu().equal(torch.arange(1000.0)) and others


def test_a_copy_from_other_memory_is_done_when_the_call_returns() -> None:
    source = torch.ones(1000)
    torch.ops.strata_device.sleep(0, 0.1)
    there = source.to("strata", non_blocking=True)
    source.zero_()
    assert there.sum().item() == 1000


def test_a_copy_to_pinned_memory_is_there_after_a_wait() -> None:
    there, target = torch.ones(10, device="strata"), torch.zeros(10).pin_memory()
    torch.ops.strata_device.sleep(0, 0.2)
    target.copy_(there, non_blocking=True)
    assert target.sum() == 0
    torch.strata.synchronize()
    assert target.sum() == 10


def test_copies_between_devices_follow_both_streams() -> None:
    here, other = torch.zeros(4, device="strata:0"), torch.zeros(4, device="strata:1")
    torch.ops.strata_device.sleep(0, 0.2)
    here.fill_(3)
    other.copy_(here)
    here.fill_(5)
    assert (other * 2).tolist() == [6] * 4 and here.tolist() == [5] * 4


def test_the_device_guard() -> None:
    assert torch.strata.current_device() == 0
    with torch.strata.device(1):
        assert torch.strata.current_device() == 1 and torch.ones(1, device="strata").device.index == 1
        with torch.strata.device("strata:0"):
            assert torch.empty(1, device="strata").device.index == 0
    assert torch.strata.current_device() == 0
    x = torch.ones(2, device="strata:1", requires_grad=True)
    y = (x * 2).sum()  # on its device, whichever is current
    y.backward()
    assert y.device.index == 1 and x.grad is not None and x.grad.device.index == 1 and torch.strata.current_device() == 0
    torch.strata.set_device(1)
    try:
        assert torch.zeros(1, device="strata").device.index == 1
    finally:
        torch.strata.set_device(0)
    with pytest.raises(ValueError, match="expected a strata device"):
        torch.strata.device("cpu")


def test_save_load_pickle_and_deepcopy() -> None:
    x = torch.randn(3, 4).to("strata:1")
    tied = {"x": x, "row": x[1], "whole": torch.nn.Parameter(x)}
    buffer = io.BytesIO()
    torch.save(tied, buffer)
    for location in (None, "cpu", "strata:0"):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=location)
        assert loaded["x"].device == torch.device(location or "strata:1") and loaded["x"].cpu().equal(x.cpu())
        loaded["row"].zero_()
        assert not loaded["x"][1].any(), "views stay views"
    assert pickle.loads(pickle.dumps(x)).cpu().equal(x.cpu())
    twin = copy.deepcopy(tied)
    twin["row"].fill_(7)
    assert twin["x"][1].tolist() == [7] * 4 and x[1].tolist() != [7] * 4 and twin["x"].device == x.device


def test_storages_grow_and_shrink() -> None:
    x = torch.arange(4.0, device="strata")
    x.resize_(6)
    assert x[:4].tolist() == [0, 1, 2, 3] and x.untyped_storage().nbytes() == 24
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(24)
    x.fill_(2)
    assert x.tolist() == [2] * 6
    y = torch.empty(0, device="strata").set_(x.untyped_storage(), 1, (2, 2), (2, 1))
    y.zero_()
    assert x.tolist() == [2, 0, 0, 0, 0, 2]


def test_modules_move_with_their_ties_and_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    before = model[0].weight
    assert model.to("strata") is model and model[0].weight is model[2].weight is before
    assert all(tensor.device.type == "strata" for tensor in model.state_dict().values())
    model.load_state_dict(copy.deepcopy(model).cpu().state_dict())
    assert model.cpu()[0].weight.device.type == "cpu"


def test_batches_are_pinned_by_a_data_loader() -> None:
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    batches = list(DataLoader(data, batch_size=2, pin_memory=True))
    assert len(batches) == 3 and all(tensor.is_pinned() for batch in batches for tensor in batch)
    workers = list(DataLoader(data, batch_size=3, num_workers=1))  # forked, after the device was used
    assert torch.cat([batch[0] for batch in workers]).equal(torch.arange(6.0))


def draw(index: int = 0) -> Tensor:
    return torch.rand(4, device=f"strata:{index}").cpu()


def test_random_numbers_follow_the_seed_and_the_order_of_calls() -> None:
    torch.manual_seed(7)
    first, second, other = draw(), draw(), draw(1)
    assert not first.equal(second) and first.equal(other), "each device has a generator"
    torch.manual_seed(7)
    assert draw().equal(first)
    state = torch.strata.get_rng_state()
    assert draw().equal(second)
    torch.strata.set_rng_state(state)
    assert draw().equal(second)
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(1)
        draw()
    torch.strata.set_rng_state(state)
    with torch.random.fork_rng(devices=[0]):
        draw()
    assert draw().equal(second)
    torch.strata.manual_seed_all(2**64 - 1)
    assert torch.strata.initial_seed() == 2**64 - 1


def test_streams_do_not_change_random_numbers() -> None:
    results = []
    for delay in (0.0, 0.1):
        torch.manual_seed(3)
        stream = torch.Stream("strata")
        with torch.strata.stream(stream):
            torch.ops.strata_device.sleep(0, delay)
            first = torch.randn(3, device="strata")
        second = torch.randn(3, device="strata")
        torch.strata.synchronize()
        results.append((first.tolist(), second.tolist()))
    assert results[0] == results[1]


def test_generators_and_distributions() -> None:
    generators = [torch.Generator("strata").manual_seed(5) for _ in range(2)]
    a, b = (torch.randn(1000, device="strata", generator=generator) for generator in generators)
    assert a.equal(b) and abs(a.mean().item()) < 0.15 and 0.9 < a.std().item() < 1.1
    clone = generators[0].clone_state()
    assert torch.rand(3, device="strata", generator=clone).equal(torch.rand(3, device="strata", generator=generators[0]))
    assert torch.randint(3, 9, (500,), device="strata").unique().tolist() == [3, 4, 5, 6, 7, 8]
    assert torch.randperm(20, device="strata").sort().values.tolist() == list(range(20))
    ones = torch.ones(2000, device="strata", requires_grad=True)
    dropped = torch.nn.functional.dropout(ones, 0.25)
    dropped.sum().backward()
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3]) and 1400 < (dropped > 0).sum().item() < 1600
    assert ones.grad is not None and ones.grad.equal(dropped)
    with pytest.raises(RuntimeError, match="generator of device strata"):
        torch.rand(3, device="strata").uniform_(generator=torch.Generator())
