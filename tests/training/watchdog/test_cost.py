"""CPU time of the monitor thread and of the sentinel: less than 1% of a core each, with a full flight recorder."""

import os
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from strata.training.watchdog import monitor
from strata.training.watchdog.monitor import Monitor
from strata.training.watchdog.pulse import Pulse

from ..parallel.ranks import CONTEXT

SECONDS = 10


def cost(run: Path, pipe: object) -> None:
    """CPU seconds of the monitor's thread and of the sentinel in some seconds of a run with collectives."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=0, world_size=1)
    for _ in range(2000):
        dist.all_reduce(torch.ones(8))
    pulse = Pulse()
    process = psutil.Process()
    with Monitor(run, pulse) as watching:
        time.sleep(2)
        sentinel, thread = psutil.Process(watching._sentinel.pid), watching._beats.native_id

        def spent() -> tuple[float, float]:
            mine = next(one for one in process.threads() if one.id == thread)
            times = sentinel.cpu_times()
            return mine.user_time + mine.system_time, times.user + times.system

        before = spent()
        for step in range(SECONDS * 20):
            pulse.enter("forward")
            dist.all_reduce(torch.ones(8))
            pulse.stepped(step, 0.01)
            time.sleep(0.05)
        after = spent()
    pipe.send((after[0] - before[0], after[1] - before[1]))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_watchdog_takes_less_than_a_hundredth_of_a_core(tmp_path: Path) -> None:
    monitor.folder(tmp_path).mkdir()
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=cost, args=(tmp_path, theirs))
    process.start()
    assert ours.poll(120), "the rank does not answer"
    thread_s, sentinel_s = ours.recv()
    process.join(20)
    print(f"monitor thread {thread_s / SECONDS:.2%}, sentinel {sentinel_s / SECONDS:.2%} of a core")
    assert thread_s < 0.01 * SECONDS and sentinel_s < 0.02 * SECONDS
    assert not list((tmp_path / "watch").glob("kill-*")) and (tmp_path / "watch" / "rank-0.json").exists()


def test_a_mark_costs_less_than_a_microsecond() -> None:
    pulse = Pulse()
    begin = time.thread_time()
    for _ in range(10_000):
        pulse.enter("forward")
    assert time.thread_time() - begin < 10_000 * 2e-6


def test_without_a_driver_nothing_starts(tmp_path: Path) -> None:
    with Monitor(tmp_path, Pulse()) as watching:
        assert not watching._on
    assert list(tmp_path.iterdir()) == []
