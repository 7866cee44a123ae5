"""Worker process of the collectives lab, one per rank: `python -m strata.planner.collectives.lab_worker JOB`."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARMUP = 3
ROUNDS = 5
ROUND_SECONDS = 0.05
MOST_CALLS = 50


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    folder, rank, ranks = Path(job["folder"]), int(job["rank"]), int(job["ranks"])
    device = torch.device("cuda", rank) if job["backend"] == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(job["backend"], init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    taken = {kind: {size: seconds_of(call(kind, size, ranks, device), device) for size in job["sizes"]} for kind in job["kinds"]}
    if rank == 0:
        (folder / "outcome.json").write_text(json.dumps(taken))
    dist.barrier()
    dist.destroy_process_group()


def call(kind: str, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    """One collective on buffers of `size` bytes."""
    whole = torch.zeros(size // 4, device=device)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole)
        case "all_gather":
            share, parts = torch.zeros(size // 4 // ranks, device=device), list(whole.chunk(ranks))
            return lambda: dist.all_gather(parts, share)
        case "all_to_all":
            other = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(other, whole)
    raise AssertionError(kind)


def seconds_of(collective: Callable[[], object], device: torch.device) -> float:
    """Seconds per call, the minimum of a few rounds, since other processes can only add time. A round has as many calls as fill a
    twentieth of a second; rank 0 broadcasts the number."""
    once = min(_timed(collective, 1, device) for _ in range(WARMUP))
    calls = torch.tensor(float(min(MOST_CALLS, max(1, int(ROUND_SECONDS / once)))), device=device)
    dist.broadcast(calls, 0)
    return min(_timed(collective, int(calls), device) for _ in range(ROUNDS))


def _timed(collective: Callable[[], object], calls: int, device: torch.device) -> float:
    dist.barrier()
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        collective()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
