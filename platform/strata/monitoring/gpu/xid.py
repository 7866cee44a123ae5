"""Counters of XID errors, the NVIDIA driver's error reports.

NVML delivers each event once, to a process that is waiting for it, so a thread waits for them.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

WAIT_MS = 500

# Prometheus sees no increase if a counter first appears at 1. XIDs that mean a broken program, memory, link or card therefore
# start at 0. Full list: https://docs.nvidia.com/deploy/xid-errors.
EXPECTED = (13, 31, 43, 45, 48, 62, 63, 64, 69, 74, 79, 92, 94, 95, 119, 120)


class XidCounts:
    """Counts XID events per GPU until `stop`. Cards that do not support XID events are reported once and skipped."""

    def __init__(self, nvml: Any, report: Callable[[str], None]) -> None:
        self._nvml = nvml
        self._report = report
        self._counts: Counter[tuple[int, int]] = Counter()  # (GPU index, XID)
        self._stopping = threading.Event()
        self._events: Any = None
        self._indices: dict[int | None, int] = {}  # by handle address: a lost card no longer returns its index
        try:
            self._events = nvml.nvmlEventSetCreate()
            self._register()
        except nvml.NVMLError as error:
            report(f"XID errors cannot be counted: {error}")
        self._thread = threading.Thread(target=self._count, name="xid", daemon=True)
        if self._indices:
            self._thread.start()

    def of(self, index: int) -> dict[int, int]:
        """Counts of a GPU by XID; empty if the card does not report XID errors."""
        if index not in self._indices.values():
            return {}
        return dict.fromkeys(EXPECTED, 0) | {xid: n for (gpu, xid), n in list(self._counts.items()) if gpu == index}

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._events is None:
            return
        try:
            self._nvml.nvmlEventSetFree(self._events)
        except self._nvml.NVMLError:
            return  # NVML is already shut down, which freed the event set

    def _register(self) -> None:
        unsupported: list[int] = []
        problem = ""
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                card = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._nvml.nvmlDeviceRegisterEvents(card, self._nvml.nvmlEventTypeXidCriticalError, self._events)
                self._indices[_address(card)] = index
            except self._nvml.NVMLError as error:
                unsupported.append(index)
                problem = str(error)
        if unsupported:
            self._report(f"GPUs {', '.join(map(str, unsupported))} do not report XID errors: {problem}")

    def _count(self) -> None:
        while not self._stopping.is_set():
            try:
                event = self._nvml.nvmlEventSetWait(self._events, WAIT_MS)
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                    continue
                # After a card is lost, every wait fails immediately. Sleep so that the loop does not spin.
                self._stopping.wait(WAIT_MS / 1000)
                continue
            index = self._indices.get(_address(event.device))
            if index is not None:
                self._counts[index, int(event.eventData)] += 1
                self._report(f"GPU {index}: XID {event.eventData}")


def _address(card: Any) -> int | None:
    return ctypes.cast(card, ctypes.c_void_p).value
