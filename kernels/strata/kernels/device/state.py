"""State of the device that torch has no names for: operators that fell back, memory's capacity, the allocator's blocks."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """A part of a segment of device memory. `active` ones are allocated, or freed while another stream still uses them."""

    segment: int
    stream: int
    offset: int
    size: int
    requested: int
    large: bool
    allocated: bool
    active: bool


def fallbacks() -> dict[str, int]:
    """Calls by operator that ran on the CPU for want of a kernel, since the start or `clear_fallbacks`."""
    return dict(torch.ops.strata_device.fallbacks())


def clear_fallbacks() -> None:
    torch.ops.strata_device.clear_fallbacks()


def set_capacity(bytes: int, device: int = 0) -> None:
    """Limits the memory of a device. STRATA_DEVICE_MEMORY sets it for all devices; the default is 4 GiB."""
    torch.ops.strata_device.set_capacity(device, bytes)


def snapshot(device: int = 0) -> list[Block]:
    """Blocks of all segments, in the order of their addresses in each segment."""
    numbers = torch.ops.strata_device.snapshot(device)
    rows = (numbers[first : first + 8] for first in range(0, len(numbers), 8))
    return [Block(*row[:5], *map(bool, row[5:])) for row in rows]
