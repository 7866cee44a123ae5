"""GPU readings of this machine through NVML.

Cards differ in what they report: a MIG card has no utilization, a vGPU no power. A value that a card does not report is None.
A card that fell off the bus is listed as lost, and the others are still read.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.monitoring.gpu import health
from strata.monitoring.gpu.actors import actor_of
from strata.monitoring.gpu.health import Health

# The driver stores several seconds of samples. This is the period of the card's own utilization, so the two are comparable.
PROCESS_SAMPLES_S = 1.0


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    actor: str  # the Ray actor it belongs to, or the program's name
    memory: int | None  # bytes
    utilization: float | None  # 0 to 1


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    utilization: float | None  # 0 to 1
    memory_used: int | None  # bytes
    memory_total: int | None
    power: float | None  # watts
    power_limit: float | None
    temperature: float | None  # °C
    sm_clock: float | None  # hertz
    sm_clock_max: float | None
    throttles: frozenset[str] | None  # names from THROTTLES; None if the card does not report them
    health: Health
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class Lost:
    """A card that the driver lists but cannot query."""

    index: int
    reason: str


@dataclass(frozen=True)
class Reading:
    gpus: tuple[Gpu, ...]
    lost: tuple[Lost, ...] = ()
    problem: str | None = None  # why no card can be read at all


THROTTLES = ("power", "thermal", "hardware")


class Cards:
    """NVML session that reads all GPUs of the machine.

    NVML stays open between readings, because opening it can take seconds if the driver unloads unused cards (persistence
    mode off). If the driver is loaded or reloaded later, a later reading finds it."""

    def __init__(self, nvml: Any = None, actor: Callable[[int], str] = actor_of) -> None:
        self._nvml = nvml
        self._actor = actor
        self._open = False
        self._lock = threading.Lock()

    def read(self) -> Reading:
        problem = self._opened()
        if problem:
            return Reading((), problem=problem)
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self.close()
            return Reading((), problem=str(error))
        gpus, lost = [], []
        for index in range(count):
            try:
                gpus.append(_read(nvml, index, self._actor))
            except nvml.NVMLError as error:
                lost.append(Lost(index, str(error)))
        return Reading(tuple(gpus), tuple(lost), None if count else "the driver lists none")

    def library(self) -> Any:
        """Returns the initialized NVML module, or None if it cannot be initialized."""
        return None if self._opened() else self._nvml

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                try:
                    self._nvml.nvmlShutdown()
                except self._nvml.NVMLError:
                    return  # the driver was unloaded first

    def _opened(self) -> str | None:
        with self._lock:
            if self._open:
                return None
            if self._nvml is None:
                try:
                    import pynvml
                except ImportError:
                    return "nvidia-ml-py is not installed"
                self._nvml = pynvml
            try:
                self._nvml.nvmlInit()
            except self._nvml.NVMLError as error:
                return str(error)
            self._open = True
            return None


def _read(nvml: Any, index: int, actor: Callable[[int], str]) -> Gpu:
    card = nvml.nvmlDeviceGetHandleByIndex(index)
    query = _Query(nvml, card)
    # Version 2 excludes memory reserved by the driver, as nvidia-smi does. Older drivers have only version 1.
    memory = query(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2) or query(nvml.nvmlDeviceGetMemoryInfo)
    utilization = query(nvml.nvmlDeviceGetUtilizationRates)
    reasons = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return Gpu(
        index=index,
        uuid=query(nvml.nvmlDeviceGetUUID) or "unknown",
        name=query(nvml.nvmlDeviceGetName) or "unknown",
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        power=_times(query(nvml.nvmlDeviceGetPowerUsage), 1e-3),
        power_limit=_times(query(nvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3),
        temperature=_times(query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU), 1.0),
        sm_clock=_times(query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM), 1e6),
        sm_clock_max=_times(query(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM), 1e6),
        throttles=None if reasons is None else _throttles(nvml, reasons),
        health=health.read(nvml, query),
        processes=_processes(nvml, query, actor),
    )


class _Query:
    """Calls NVML functions on a card. Returns None if the card does not support one, and raises if the card is lost."""

    def __init__(self, nvml: Any, card: Any) -> None:
        self._nvml = nvml
        self._card = card

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(self._card, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _throttles(nvml: Any, reasons: int) -> frozenset[str]:
    """Throttling by power, heat or hardware. Idle clocks and clocks set by a user do not count."""
    masks = {
        "power": nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "thermal": nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hardware": nvml.nvmlClocksThrottleReasonHwSlowdown,
    }
    return frozenset(name for name in THROTTLES if reasons & masks[name])


def _processes(nvml: Any, query: _Query, actor: Callable[[int], str]) -> tuple[GpuProcess, ...]:
    running = query(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    memory: dict[int, int | None] = {}
    for process in running:  # a MIG card lists a process once per instance it has memory on
        before, more = memory.get(process.pid), process.usedGpuMemory
        memory[process.pid] = before if more is None else (before or 0) + more
    shares = _shares(nvml, query) if memory else {}
    return tuple(
        GpuProcess(pid, actor(pid), used, None if shares is None else shares.get(pid, 0.0))
        for pid, used in sorted(memory.items())
    )


def _shares(nvml: Any, query: _Query) -> dict[int, float] | None:
    def recent_samples(card: Any) -> Sequence[Any]:
        since = int((time.time() - PROCESS_SAMPLES_S) * 1e6)
        try:
            samples: Sequence[Any] = nvml.nvmlDeviceGetProcessUtilization(card, since)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:  # no process ran a kernel since then
                return []
            raise
        return samples

    samples = query(recent_samples)
    if samples is None:
        return None
    # Drivers mix invalid samples, with more than 100%, among the valid ones.
    good = sorted((sample for sample in samples if sample.smUtil <= 100), key=lambda sample: int(sample.timeStamp))
    return {sample.pid: sample.smUtil / 100 for sample in good}  # the newest sample of each process
