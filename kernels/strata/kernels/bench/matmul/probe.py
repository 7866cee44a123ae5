"""Runs each step once in a process of its own, before anything is measured.

A kernel that hangs or accesses memory that is not its own takes its process with it; the benchmark's process must survive to
measure the others. Triton's disk cache then has every kernel, compiled in parallel.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

LONGEST = 75.0  # seconds of one process, import and compilation included
Shape = tuple[int, int, int]  # rows, columns, inner


def probe(steps: Sequence[str], shapes: Sequence[Shape], module: str = __name__, longest: float = LONGEST) -> dict[str, str]:
    """Reasons by step, of the steps that fail on a shape."""

    def failure(step: str) -> str | None:
        command = [sys.executable, "-m", module, step, *(",".join(map(str, shape)) for shape in shapes)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=longest)
        except subprocess.TimeoutExpired:
            return f"not finished after {longest:.0f} s"
        lines = done.stderr.strip().splitlines()
        return None if done.returncode == 0 else (lines[-1] if lines else f"the process ended with {done.returncode}")

    with ThreadPoolExecutor(max(1, min(len(steps), (os.cpu_count() or 2) // 2))) as pool:
        return {step: reason for step, reason in zip(steps, pool.map(failure, steps), strict=True) if reason}


def main(step: str, *shapes: str) -> None:
    import torch

    from strata.kernels.ladder.steps import matmul

    for text in shapes:
        rows, columns, inner = map(int, text.split(","))
        a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((rows, inner), (inner, columns)))
        matmul(step, a, b)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
