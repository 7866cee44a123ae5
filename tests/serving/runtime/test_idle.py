"""CPU use of an idle endpoint."""

import time

from support import Served


def test_idle_engines_use_little_cpu(endpoint: Served) -> None:
    engines = [p for p in endpoint.process.children(recursive=True) if p.name().startswith("VLLM")]
    assert len(engines) == 3
    time.sleep(2)  # for requests of earlier tests to finish

    def seconds() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in engines)

    before = seconds()
    time.sleep(5)
    assert (seconds() - before) / 5 < 0.3  # of a core; NIXL's default uses three cores
