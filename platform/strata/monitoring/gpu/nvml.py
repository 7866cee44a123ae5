"""The GPUs of this machine, read through NVML.

Cards differ in what they tell: a MIG card has no utilisation, a vGPU no power. What a card does not tell is None, and never
an error; a card that fell off the bus is named as lost, and the others are read all the same.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.monitoring.gpu.actors import actor_of

# The driver keeps samples of some seconds; as old as a card's own utilisation is what both are to be.
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
    throttles: frozenset[str] | None  # of THROTTLES; None: the card does not say
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class Lost:
    """A card that the driver counts and that does not answer."""

    index: int
    reason: str


@dataclass(frozen=True)
class Reading:
    gpus: tuple[Gpu, ...]
    lost: tuple[Lost, ...] = ()
    problem: str | None = None  # why no card can be read at all


THROTTLES = ("power", "thermal", "hardware")


class Cards:
    """NVML stays open between readings: opening it can take seconds where the driver lets go of unused cards. A driver that
    is not there yet, or is loaded anew, is found at a later reading."""

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
        return Reading(tuple(gpus), tuple(lost), None if count else "the driver shows none")

    def library(self) -> Any:
        """NVML, opened, for those who ask it more; None where it cannot be opened."""
        return None if self._opened() else self._nvml

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                try:
                    self._nvml.nvmlShutdown()
                except self._nvml.NVMLError:
                    return  # the driver went first

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
    told = _Told(nvml, card)
    # Version 2 leaves out what the driver keeps to itself, as nvidia-smi does; older drivers have only version 1.
    memory = told(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2) or told(nvml.nvmlDeviceGetMemoryInfo)
    utilization = told(nvml.nvmlDeviceGetUtilizationRates)
    reasons = told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return Gpu(
        index=index,
        uuid=told(nvml.nvmlDeviceGetUUID) or "unknown",
        name=told(nvml.nvmlDeviceGetName) or "unknown",
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        power=_times(told(nvml.nvmlDeviceGetPowerUsage), 1e-3),
        power_limit=_times(told(nvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3),
        temperature=_times(told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU), 1.0),
        sm_clock=_times(told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM), 1e6),
        sm_clock_max=_times(told(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM), 1e6),
        throttles=None if reasons is None else _throttles(nvml, reasons),
        processes=_processes(nvml, told, actor),
    )


class _Told:
    """What a card says to a question, or None where it cannot say. That it is lost is no answer: that goes up."""

    def __init__(self, nvml: Any, card: Any) -> None:
        self._nvml = nvml
        self._card = card

    def __call__(self, ask: Callable[..., Any], *words: Any) -> Any:
        try:
            return ask(self._card, *words)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _throttles(nvml: Any, reasons: int) -> frozenset[str]:
    """Only what slows a card against one's will: idle cards and clocks that somebody set are not throttled."""
    masks = {
        "power": nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "thermal": nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hardware": nvml.nvmlClocksThrottleReasonHwSlowdown,
    }
    return frozenset(name for name in THROTTLES if reasons & masks[name])


def _processes(nvml: Any, told: _Told, actor: Callable[[int], str]) -> tuple[GpuProcess, ...]:
    running = told(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    memory: dict[int, int | None] = {}
    for process in running:  # on a MIG card, once for each instance that it has memory on
        before, more = memory.get(process.pid), process.usedGpuMemory
        memory[process.pid] = before if more is None else (before or 0) + more
    shares = _shares(nvml, told) if memory else {}
    return tuple(
        GpuProcess(pid, actor(pid), used, None if shares is None else shares.get(pid, 0.0))
        for pid, used in sorted(memory.items())
    )


def _shares(nvml: Any, told: _Told) -> dict[int, float] | None:
    def ask(card: Any) -> Sequence[Any]:
        since = int((time.time() - PROCESS_SAMPLES_S) * 1e6)
        try:
            samples: Sequence[Any] = nvml.nvmlDeviceGetProcessUtilization(card, since)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:  # nobody ran a kernel since
                return []
            raise
        return samples

    samples = told(ask)
    if samples is None:
        return None
    # Drivers put samples of garbage among the good ones: shares beyond 100%.
    good = sorted((sample for sample in samples if sample.smUtil <= 100), key=lambda sample: int(sample.timeStamp))
    return {sample.pid: sample.smUtil / 100 for sample in good}  # the newest of each process
