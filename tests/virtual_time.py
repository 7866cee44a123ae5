"""Event loop whose clock jumps to the next timer, so that tests of waits and deadlines are exact and take no time."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

START = 1000.0


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self._really_select = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def _select(self, timeout: float | None) -> Any:
        assert timeout is not None, "every task waits for another"
        self.now += max(0.0, timeout)
        return self._really_select(0)


def run(test: Callable[[], Coroutine[Any, Any, None]], *modules: Any) -> None:
    """Runs a test. In `modules`, `time.monotonic` is the clock of the loop."""
    loop = VirtualLoop()
    before = [module.time for module in modules]
    for module in modules:
        module.time = SimpleNamespace(monotonic=loop.time)
    try:
        loop.run_until_complete(test())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        for module, time in zip(modules, before, strict=True):
            module.time = time
        loop.close()


def elapsed() -> float:
    """Seconds since the test began."""
    return asyncio.get_running_loop().time() - START
