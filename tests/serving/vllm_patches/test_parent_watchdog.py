"""The parent watchdog ends an engine process with its replica, also if the replica died before the watchdog started."""

import inspect
import subprocess
import sys

import psutil
import pytest

ENGINE = """
import time
time.sleep({late})
from strata.serving.vllm_patches import parent_watchdog
parent_watchdog.install()
time.sleep(60)
"""
REPLICA = """
import os, subprocess, sys, time
os.environ["STRATA_REPLICA_PID"] = str(os.getpid())
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("late", "replica_lives_s"), [(0, 2), (2, 0)])
def test_engine_ends_with_its_replica(late: int, replica_lives_s: int) -> None:
    command = [sys.executable, "-c", REPLICA, ENGINE.format(late=late)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout
        engine = psutil.Process(int(replica.stdout.readline()))
        with pytest.raises(psutil.TimeoutExpired):
            engine.wait(timeout=replica_lives_s)
        replica.kill()
    engine.wait(timeout=10)


def test_vllm_still_needs_it() -> None:
    core, utils = pytest.importorskip("vllm.v1.engine.core"), pytest.importorskip("vllm.v1.engine.utils")
    source = inspect.getsource(core) + inspect.getsource(utils)
    signs = [sign for sign in ("PDEATHSIG", "getppid", "parent_process(", "death_pipe") if sign in source]
    assert not signs, f"vLLM's engine process checks its parent ({signs}): if it ends with it, remove parent_watchdog.py."
    assert "load_general_plugins()" in source, "vLLM's engine process no longer loads plugins: parent_watchdog.py has no effect."
