"""Caching allocator: a model of it in Python, and the statistics and blocks that the device reports."""

import gc
import random
import re
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from strata.kernels import device

device.load()

MIB = 2**20
PLACE = "strata:1"  # of which no other case allocates
BYTES = ("allocated_bytes", "active_bytes", "inactive_split_bytes", "reserved_bytes", "requested_bytes")
COUNTS = ("allocation", "active", "inactive_split", "segment")


@pytest.fixture(autouse=True)
def empty_before() -> None:
    empty_device()


def empty_device() -> None:
    gc.collect()  # of errors, whose frames hold tensors
    device.set_capacity(2**32, 1)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(1)
    torch.accelerator.reset_accumulated_memory_stats(1)
    assert all(stats()[f"{name}.all.current"] == 0 for name in (*BYTES, *COUNTS))


def stats() -> dict[str, int]:
    return torch.accelerator.memory_stats(1)


def byte_tensor(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=PLACE)


@dataclass
class Part:
    size: int
    requested: int = 0

    @property
    def free(self) -> bool:
        return self.requested == 0


@dataclass
class Segment:
    number: int
    stream: int
    large: bool
    parts: list[Part]


@dataclass
class Model:
    """The allocator as its documentation describes it. All numbers are summed up from the blocks, not counted along."""

    capacity: int
    segments: list[Segment] = field(default_factory=list)
    made: int = 0
    dropped: int = 0
    retries: int = 0
    ooms: int = 0
    peaks: dict[str, int] = field(default_factory=dict)

    def allocate(self, requested: int, stream: int) -> Part | None:
        size = -(-requested // 512) * 512
        large = size > MIB
        fitting = [
            (part.size, segment.number, index, segment)
            for segment in self.segments
            if segment.stream == stream and segment.large == large
            for index, part in enumerate(segment.parts)
            if part.free and part.size >= size
        ]
        if fitting:
            _, _, index, segment = min(fitting, key=lambda row: row[:3])
        else:
            new = self._segment(size, stream, large)
            if new is None:
                self.retries += 1
                self.empty_cache()
                new = self._segment(size, stream, large)
            if new is None:
                self.ooms += 1
                return None
            segment, index = new, 0
        part = segment.parts[index]
        rest = part.size - size
        if rest > MIB if large else rest >= 512:
            segment.parts.insert(index + 1, Part(rest))
            part.size = size
        part.requested = requested
        return part

    def _segment(self, size: int, stream: int, large: bool) -> Segment | None:
        total = 2 * MIB if not large else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.numbers()["reserved_bytes.all"] + total > self.capacity:
            return None
        self.segments.append(Segment(self.made, stream, large, [Part(total)]))
        self.made += 1
        return self.segments[-1]

    def free(self, part: Part) -> None:
        part.requested = 0
        for segment in self.segments:
            merged: list[Part] = []
            for each in segment.parts:
                if merged and merged[-1].free and each.free:
                    merged[-1].size += each.size
                else:
                    merged.append(each)
            segment.parts = merged

    def empty_cache(self) -> None:
        remaining = [segment for segment in self.segments if len(segment.parts) > 1 or not segment.parts[0].free]
        self.dropped += len(self.segments) - len(remaining)
        self.segments = remaining

    def numbers(self) -> dict[str, int]:
        found = {}
        for pool, larges in {"all": (False, True), "small_pool": (False,), "large_pool": (True,)}.items():
            segments = [segment for segment in self.segments if segment.large in larges]
            parts = [part for segment in segments for part in segment.parts]
            used = [part for part in parts if not part.free]
            split = [part for segment in segments if len(segment.parts) > 1 for part in segment.parts if part.free]
            found |= {
                f"allocated_bytes.{pool}": sum(part.size for part in used),
                f"active_bytes.{pool}": sum(part.size for part in used),
                f"inactive_split_bytes.{pool}": sum(part.size for part in split),
                f"reserved_bytes.{pool}": sum(part.size for part in parts),
                f"requested_bytes.{pool}": sum(part.requested for part in used),
                f"allocation.{pool}": len(used),
                f"active.{pool}": len(used),
                f"inactive_split.{pool}": len(split),
                f"segment.{pool}": len(segments),
            }
        return found

    def blocks(self) -> list[tuple[int, int, int, int, int, bool, bool]]:
        rows = []
        for segment in self.segments:
            offset = 0
            for part in segment.parts:
                rows.append((segment.number, segment.stream, offset, part.size, part.requested, segment.large, not part.free))
                offset += part.size
        return rows


def random_size(draw: random.Random) -> int:
    unit = draw.choice([1, 512, 512, 4096, 65536, MIB, MIB])
    size = max(1, unit * draw.randint(1, 24) + draw.choice([-1, 0, 0, 1]))
    return draw.choice([size, size, size, MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 19 * MIB])


@pytest.mark.parametrize("seed", range(4))
def test_statistics_equal_a_model_under_random_allocations(seed: int) -> None:
    draw = random.Random(seed)
    model = Model(96 * MIB)
    probe = byte_tensor(1)
    model.made = first = device.snapshot(1)[0].segment + 1  # numbers continue over cases
    del probe
    empty_device()
    device.set_capacity(model.capacity, 1)
    streams = [torch.strata.default_stream(1), torch.Stream(PLACE)]
    live: list[tuple[Tensor, Part]] = []
    for step in range(300):
        action = draw.random()
        if action < 0.55:
            size, stream = random_size(draw), draw.choice(streams)
            part = model.allocate(size, stream.stream_id)
            try:
                with torch.strata.stream(stream):
                    tensor = byte_tensor(size)
            except torch.OutOfMemoryError:
                assert part is None, f"step {step}: {size} bytes fit"
            else:
                assert part is not None, f"step {step}: {size} bytes do not fit"
                live.append((tensor, part))
                del tensor
        elif action < 0.97 and live:
            tensor, part = live.pop(draw.randrange(len(live)))
            del tensor
            model.free(part)
        else:
            torch.accelerator.empty_cache()
            model.empty_cache()
        reported, expected = stats(), model.numbers()
        assert {name: reported[f"{name}.current"] for name in expected} == expected, f"step {step}"
        model.peaks = {name: max(value, model.peaks.get(name, 0)) for name, value in expected.items()}
        assert {name: reported[f"{name}.peak"] for name in expected} == model.peaks, f"step {step}"
        for name, value in expected.items():
            assert reported[f"{name}.allocated"] - reported[f"{name}.freed"] == value, name
        rows = [
            (block.segment, block.stream, block.offset, block.size, block.requested, block.large, block.allocated)
            for block in device.snapshot(1)
        ]
        assert rows == model.blocks(), f"step {step}"
        assert all(block.active == block.allocated for block in device.snapshot(1))
        assert reported["num_alloc_retries"] == model.retries and reported["num_ooms"] == model.ooms
        assert reported["num_device_alloc"] == model.made - first and reported["num_device_free"] == model.dropped
        free, capacity = torch.accelerator.get_memory_info(1)
        assert capacity == model.capacity and free == capacity - expected["reserved_bytes.all"]
    assert model.ooms and model.retries > model.ooms, "the sizes reach both ends of an allocation that does not fit"


def test_a_request_of_nothing_allocates_nothing() -> None:
    assert byte_tensor(0).numel() == 0
    assert stats()["allocation.all.allocated"] == 0


def test_out_of_memory_names_what_was_requested_held_and_free() -> None:
    device.set_capacity(32 * MIB, 1)
    held = byte_tensor(12 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        byte_tensor(24 * MIB - 100)
    text = str(raised.value)
    assert "strata:1 is out of memory. Tried to allocate 24.00 MiB (25165724 bytes requested)" in text
    assert "capacity of 32.00 MiB, 12.00 MiB are held" in text and "12.00 MiB in tensors" in text, text
    assert re.search(r"20\.00 MiB are free", text), text
    after = stats()
    assert after["num_ooms"] == 1 and after["num_alloc_retries"] == 1 and after["allocated_bytes.all.current"] == held.nbytes
    assert byte_tensor(20 * MIB).numel() == 20 * MIB, "the device is usable after the error"


def test_cached_segments_are_given_up_before_an_error() -> None:
    device.set_capacity(40 * MIB, 1)
    del_me = byte_tensor(24 * MIB)
    address = del_me.data_ptr()
    del del_me
    assert stats()["reserved_bytes.all.current"] == 24 * MIB
    again = byte_tensor(24 * MIB)
    assert again.data_ptr() == address and stats()["num_device_alloc"] == 1, "a cached segment is reused"
    del again
    tensor = byte_tensor(38 * MIB)
    assert stats()["num_alloc_retries"] == 1 and stats()["num_ooms"] == 0 and stats()["reserved_bytes.all.current"] == 38 * MIB
    del tensor


def test_a_lower_capacity_leaves_no_negative_rest() -> None:
    tensor = byte_tensor(16 * MIB)
    device.set_capacity(MIB, 1)
    assert torch.accelerator.get_memory_info(1) == (0, MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"0\.00 MiB are free"):
        byte_tensor(2 * MIB)
    del tensor


def test_a_stream_does_not_reuse_memory_of_another() -> None:
    other = torch.Stream(PLACE)
    tensor = byte_tensor(4 * MIB)
    address = tensor.data_ptr()
    del tensor
    with torch.strata.stream(other):
        there = byte_tensor(4 * MIB)
    assert there.data_ptr() != address
    assert byte_tensor(4 * MIB).data_ptr() == address


def test_recorded_memory_stays_active_until_the_other_stream_is_done() -> None:
    other = torch.Stream(PLACE)
    tensor = byte_tensor(4 * MIB)
    address = tensor.data_ptr()
    with torch.strata.stream(other):
        torch.ops.strata_device.sleep(1, 0.3)
    tensor.record_stream(other)
    del tensor
    now = stats()
    assert now["allocated_bytes.all.current"] == 0 and now["active_bytes.all.current"] == 4 * MIB
    assert device.snapshot(1)[0].active and not device.snapshot(1)[0].allocated
    meanwhile = byte_tensor(4 * MIB)
    assert meanwhile.data_ptr() != address, "reused while another stream may still write to it"
    other.synchronize()
    after = byte_tensor(4 * MIB)
    assert after.data_ptr() == address
    assert stats()["active_bytes.all.current"] == 8 * MIB


def test_memory_that_is_not_recorded_is_reused_at_once() -> None:
    other = torch.Stream(PLACE)
    tensor = byte_tensor(4 * MIB)
    address = tensor.data_ptr()
    with torch.strata.stream(other):
        torch.ops.strata_device.sleep(1, 0.2)
    del tensor
    assert byte_tensor(4 * MIB).data_ptr() == address
    other.synchronize()


def test_emptying_the_cache_waits_for_queued_work() -> None:
    tensor = torch.zeros(4 * MIB, dtype=torch.uint8, device=PLACE)
    begin = time.perf_counter()
    torch.ops.strata_device.sleep(1, 0.2)
    tensor.add_(1)
    del tensor
    torch.accelerator.empty_cache()
    assert time.perf_counter() - begin > 0.19 and stats()["reserved_bytes.all.current"] == 0


def test_peaks_restart_at_the_present() -> None:
    first = byte_tensor(MIB)
    second = byte_tensor(3 * MIB)
    del second
    assert torch.strata.max_memory_allocated(1) == 4 * MIB
    torch.strata.reset_peak_memory_stats(1)
    assert torch.strata.max_memory_allocated(1) == torch.strata.memory_allocated(1) == first.nbytes


def test_the_summary_has_the_statistics() -> None:
    tensor = byte_tensor(3 * MIB)
    row = next(line for line in torch.strata.memory_summary(1).splitlines() if line.startswith("allocated_bytes"))
    assert row.split()[1:] == [f"{tensor.nbytes:,}"] * 3 + ["0"]
