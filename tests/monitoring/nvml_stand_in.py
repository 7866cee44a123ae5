"""Fake NVML for machines without a GPU.

It implements the functions that `strata.monitoring.gpu.nvml` calls, with values from `recorded/nvml_h200x2.json`. Constants and
errors are those of the real `pynvml`. `python tests/monitoring/nvml_stand_in.py` writes `recorded/gpu_exporter.txt`, the
exporter's output for these values.
"""

import ctypes
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from strata.monitoring.gpu import exporter
from strata.monitoring.gpu import xid as gpu_xid
from strata.monitoring.gpu.nvml import Cards

RECORDED = Path(__file__).parent / "recorded"
NODE = "gpu-node-1"


class Nvml:
    """Fake of the module `pynvml`. `broken` maps (card, function) to an error code; the function "*" breaks all calls."""

    NVMLError = pynvml.NVMLError

    def __init__(self, cards: list[dict[str, Any]] | None = None) -> None:
        self.cards: list[dict[str, Any]] = cards if cards is not None else recorded()
        self.broken: dict[tuple[int, str], int] = {}
        self.init_error: int | None = None
        self.opened = 0
        self.event_sets = 0
        self._events: list[tuple[int, int]] = []
        self._arrived = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)  # NVML_ERROR_…, NVML_CLOCK_SM and other constants

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._check(index, "nvmlDeviceGetHandleByIndex")
        return ctypes.cast(self._address(index), pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetUUID(self, card: Any) -> Any:
        return self._of(card, "nvmlDeviceGetUUID")["uuid"]

    def nvmlDeviceGetName(self, card: Any) -> Any:
        return self._of(card, "nvmlDeviceGetName")["name"]

    def nvmlDeviceGetUtilizationRates(self, card: Any) -> Any:
        return SimpleNamespace(gpu=self._of(card, "nvmlDeviceGetUtilizationRates")["utilization_percent"])

    def nvmlDeviceGetMemoryInfo(self, card: Any, version: int | None = None) -> Any:
        values = self._of(card, "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo")
        reserved = 0 if version else values["memory_reserved"]
        return SimpleNamespace(used=values["memory_used"] + reserved, total=values["memory_total"])

    def nvmlDeviceGetPowerUsage(self, card: Any) -> Any:
        return self._of(card, "nvmlDeviceGetPowerUsage")["power_milliwatts"]

    def nvmlDeviceGetEnforcedPowerLimit(self, card: Any) -> Any:
        return self._of(card, "nvmlDeviceGetEnforcedPowerLimit")["power_limit_milliwatts"]

    def nvmlDeviceGetTemperature(self, card: Any, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._of(card, "nvmlDeviceGetTemperature")["temperature_celsius"]

    def nvmlDeviceGetClockInfo(self, card: Any, clock: int) -> Any:
        assert clock == pynvml.NVML_CLOCK_SM
        return self._of(card, "nvmlDeviceGetClockInfo")["sm_clock_megahertz"]

    def nvmlDeviceGetMaxClockInfo(self, card: Any, clock: int) -> Any:
        assert clock == pynvml.NVML_CLOCK_SM
        return self._of(card, "nvmlDeviceGetMaxClockInfo")["sm_clock_max_megahertz"]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Any) -> Any:
        return self._of(card, "nvmlDeviceGetCurrentClocksThrottleReasons")["throttle_reasons"]

    def nvmlDeviceGetTotalEccErrors(self, card: Any, kind: int, counter: int) -> Any:
        assert counter == pynvml.NVML_VOLATILE_ECC
        names = {pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED: "corrected", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: "uncorrected"}
        return self._of(card, "nvmlDeviceGetTotalEccErrors")["ecc_errors"][names[kind]]

    def nvmlDeviceGetRemappedRows(self, card: Any) -> Any:
        rows = self._of(card, "nvmlDeviceGetRemappedRows")["remapped_rows"]
        return rows["corrected"], rows["uncorrected"], rows["pending"], rows["failed"]

    def nvmlDeviceGetFieldValues(self, card: Any, fields: list[int]) -> Any:
        counts = self._of(card, "nvmlDeviceGetFieldValues")["nvlink_errors"]
        return [
            SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(ullVal=counts[str(field)]))
            if str(field) in counts
            else SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED, value=SimpleNamespace(ullVal=0))
            for field in fields
        ]

    def nvmlDeviceGetComputeRunningProcesses(self, card: Any) -> Any:
        processes = self._of(card, "nvmlDeviceGetComputeRunningProcesses")["processes"]
        return [SimpleNamespace(pid=p["pid"], usedGpuMemory=p["memory"]) for p in processes]

    def nvmlDeviceGetProcessUtilization(self, card: Any, since: int) -> Any:
        samples = self._of(card, "nvmlDeviceGetProcessUtilization")["process_samples"]
        if not samples:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(pid=s["pid"], smUtil=s["sm_percent"], timeStamp=since + s["after"]) for s in samples]

    def nvmlEventSetCreate(self) -> Any:
        self.event_sets += 1
        return object()

    def nvmlEventSetFree(self, _: Any) -> None:
        self.event_sets -= 1

    def nvmlDeviceRegisterEvents(self, card: Any, kinds: int, _: Any) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self._of(card, "nvmlDeviceRegisterEvents")

    def nvmlEventSetWait(self, _: Any, timeout_ms: int) -> Any:
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._events, timeout_ms / 1000):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            index, xid = self._events.pop(0)
        return SimpleNamespace(device=ctypes.cast(self._address(index), pynvml.c_nvmlDevice_t), eventData=xid)

    def report_xid(self, index: int, xid: int) -> None:
        with self._arrived:
            self._events.append((index, xid))
            self._arrived.notify()

    def _address(self, index: int) -> int:
        return 0x1000 * (index + 1)

    def _check(self, index: int, function: str) -> None:
        error = self.broken.get((index, function), self.broken.get((index, "*")))
        if error is not None:
            raise pynvml.NVMLError(error)

    def _of(self, card: Any, function: str) -> dict[str, Any]:
        index = (ctypes.cast(card, ctypes.c_void_p).value or 0) // 0x1000 - 1
        self._check(index, function)
        return self.cards[index]


def recorded() -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = json.loads((RECORDED / "nvml_h200x2.json").read_text())
    return cards


def recorded_cards() -> Cards:
    actors = {process["pid"]: process["actor"] for card in recorded() for process in card["processes"]}
    return Cards(Nvml(), actors.__getitem__)


def exporter_text() -> str:
    xids = {
        index: dict.fromkeys(gpu_xid.EXPECTED, 0) | {int(xid): count for xid, count in card["xid_errors"].items()}
        for index, card in enumerate(recorded())
    }

    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from exporter.families(NODE, recorded_cards().read(), xids)

    registry = CollectorRegistry()
    registry.register(Once())
    return generate_latest(registry).decode()


if __name__ == "__main__":
    (RECORDED / "gpu_exporter.txt").write_text(exporter_text())
