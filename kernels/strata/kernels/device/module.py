"""The module `torch.strata`, with the functions that torch and its users look for in the module of a device.

It is registered as a whole: every public name here is one of `torch.strata`. What torch has for any accelerator is from there.
"""

from collections.abc import Iterable

import torch
from torch import Event, Tensor
from torch.accelerator import current_device_index as current_device
from torch.accelerator import (
    current_stream,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_stream,
    synchronize,
)
from torch.accelerator import get_memory_info as mem_get_info
from torch.accelerator import set_device_index as set_device

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

Place = torch.device | str | int | None
_DEVICE_TYPE = 20  # DeviceType::PrivateUse1
_SUMMARY = (
    "allocated_bytes", "active_bytes", "inactive_split_bytes", "reserved_bytes", "requested_bytes",
    "allocation", "active", "inactive_split", "segment",
)  # fmt: skip


def _index(place: Place) -> int:
    """Device index of what users write for a device: strata:1, 1 or nothing."""
    if isinstance(place, str):
        place = torch.device(place)
    if isinstance(place, torch.device):
        if place.type != "strata":
            raise ValueError(f"expected a strata device, got '{place}'")
        place = place.index
    return current_device() if place is None else place


class device:
    """Context in which a device is the current one."""

    def __init__(self, device: Place) -> None:
        self.index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self.index)

    def __exit__(self, *error: object) -> None:
        torch._C._accelerator_exchangeDevice(self._before)


def device_count() -> int:
    return int(torch.ops.strata_device.device_count())


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(torch.ops.strata_device.is_initialized()) and not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.strata_device.in_bad_fork())


def Stream(device: Place = None, priority: int = 0) -> torch.Stream:
    """A stream of a device, by default the current one."""
    return torch.Stream(device=torch.device("strata", _index(device)), priority=priority)


def stream(stream: torch.Stream) -> torch.Stream:
    """Context in which `stream` is the current one: a torch.Stream is that context itself."""
    return stream


def default_stream(device: Place = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE)


def manual_seed(seed: int) -> None:
    """Seeds the generator of the current device."""
    torch.ops.strata_device.seed(current_device(), _as_int64(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        torch.ops.strata_device.seed(index, _as_int64(seed))


def _as_int64(seed: int) -> int:
    """torch allows seeds up to 2**64 - 1; an operator's argument is signed."""
    seed = int(seed) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def initial_seed() -> int:
    return int(torch.ops.strata_device.initial_seed(current_device())) % 2**64


def get_rng_state(device: Place = "strata") -> Tensor:
    state: Tensor = torch.ops.strata_device.rng_state(_index(device))
    return state


def set_rng_state(new_state: Tensor, device: Place = "strata") -> None:
    torch.ops.strata_device.set_rng_state(_index(device), new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def get_device_name(device: Place = None) -> str:
    return f"strata:{_index(device)}, host memory behind a fake device"


def memory_summary(device: Place = None) -> str:
    """Table of the allocator's statistics, as torch.cuda.memory_summary prints it."""
    stats = memory_stats(_index(device))
    free, capacity = mem_get_info(_index(device))
    rows = [f"{'':22}{'current':>20}{'peak':>20}{'allocated':>20}{'freed':>20}"]
    for name in _SUMMARY:
        numbers = (stats[f"{name}.all.{column}"] for column in ("current", "peak", "allocated", "freed"))
        rows.append(f"{name:22}" + "".join(f"{number:>20,}" for number in numbers))
    rows.append(f"capacity {capacity:,}, free {free:,}, retries {stats['num_alloc_retries']}, out of memory {stats['num_ooms']}")
    return "\n".join(rows)
