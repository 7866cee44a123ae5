"""The driver's own error reports (XIDs) counted as they come: NVML tells them once, to whoever waits for them."""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

WAIT_MS = 500

# A counter that appears with its first event is no increase to Prometheus: those that mean a broken program, memory, link or
# card are there at 0 from the start. https://docs.nvidia.com/deploy/xid-errors has them all.
EXPECTED = (13, 31, 43, 45, 48, 62, 63, 64, 69, 74, 79, 92, 94, 95, 119, 120)


class XidCounts:
    """Counts until `stop`. Cards that cannot report are named once and left out."""

    def __init__(self, nvml: Any, say: Callable[[str], None]) -> None:
        self._nvml = nvml
        self._say = say
        self._counts: Counter[tuple[int, int]] = Counter()  # (GPU's index, XID)
        self._stopping = threading.Event()
        self._events: Any = None
        self._indices: dict[int | None, int] = {}  # by the handle's address: a card that is lost no longer tells its index
        try:
            self._events = nvml.nvmlEventSetCreate()
            self._register()
        except nvml.NVMLError as error:
            say(f"XID errors cannot be counted here: {error}")
        self._thread = threading.Thread(target=self._count, name="xid", daemon=True)
        if self._indices:
            self._thread.start()

    def of(self, index: int) -> dict[int, int]:
        """By XID; nothing of a card that cannot report."""
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
            return  # NVML was closed before, and the set with it

    def _register(self) -> None:
        silent: list[int] = []
        problem = ""
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                card = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._nvml.nvmlDeviceRegisterEvents(card, self._nvml.nvmlEventTypeXidCriticalError, self._events)
                self._indices[_address(card)] = index
            except self._nvml.NVMLError as error:
                silent.append(index)
                problem = str(error)
        if silent:
            self._say(f"GPUs {', '.join(map(str, silent))} do not report XID errors: {problem}")

    def _count(self) -> None:
        while not self._stopping.is_set():
            try:
                event = self._nvml.nvmlEventSetWait(self._events, WAIT_MS)
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                    continue
                # A lost card makes every wait fail at once. What it has to say it has said: no reason to stop, or to spin.
                self._stopping.wait(WAIT_MS / 1000)
                continue
            index = self._indices.get(_address(event.device))
            if index is not None:
                self._counts[index, int(event.eventData)] += 1
                self._say(f"GPU {index}: XID {event.eventData}")


def _address(card: Any) -> int | None:
    return ctypes.cast(card, ctypes.c_void_p).value
