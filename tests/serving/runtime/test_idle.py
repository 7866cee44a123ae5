"""An endpoint that nobody asks anything must leave the machine alone."""

import time

from support import Served


def test_idle_engines_use_hardly_any_cpu(endpoint: Served) -> None:
    engines = [p for p in endpoint.process.children(recursive=True) if p.name().startswith("VLLM")]
    assert len(engines) == 3
    time.sleep(2)  # whatever the test before this one asked for

    def seconds() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in engines)

    before = seconds()
    time.sleep(5)
    assert (seconds() - before) / 5 < 0.3  # of a core; NIXL's default takes three whole ones
