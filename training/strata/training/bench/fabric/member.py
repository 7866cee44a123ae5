"""One rank of the measurement: joins a process group and times all-reduces in parts of it."""

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROUNDS = 4  # the first one is a warm-up
ROUND_BYTES = 64 * 2**20
CALLS = (2, 20)  # least and most in a round
IPC_LOCK = 14  # bit of the capability in CapEff
Address = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """`node` identifies the node, `host` is its name for people. `gpu` is its index on the node; None on CPUs. `lockable` is the
    memory that the process may lock, in bytes; None: without limit."""

    node: str
    host: str
    gpu: str | None
    lockable: int | None


class Member:
    """A team calls each method on all ranks concurrently. torch is imported after `see` has made the node's GPUs visible."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._store: Any = None
        self._index = 0  # of the GPU, among the visible ones

    def see(self, gpus: Sequence[str], own: str) -> None:
        """Makes all GPUs of the node visible, as Ray Train does: NCCL then finds the links between them."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._index = list(gpus).index(own)

    def open(self, host: str | None) -> Address | None:
        """Opens the store by which the ranks meet, on a port that the kernel chooses. Rank 0 does, the others have no `host`."""
        import torch.distributed as dist  # on all ranks, concurrently: it takes seconds

        if host is None:
            return None
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return host, self._store.port

    def join(self, address: Address, rank: int, ranks: int, timeout_s: float) -> str | None:
        """Joins the process group. Returns the GPU's name, as its driver reports it."""
        import torch
        import torch.distributed as dist

        self.rank, self.ranks = rank, ranks
        torch.set_num_threads(1)
        if self.backend == "nccl":
            torch.cuda.set_device(self._index)
        self.device = torch.device("cuda", self._index) if self.backend == "nccl" else torch.device("cpu")
        store = self._store or dist.TCPStore(*address, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
        return torch.cuda.get_device_name(self.device) if self.backend == "nccl" else None

    def all_reduce(self, ranks: Sequence[int], sizes: Sequence[int]) -> list[float]:
        """Seconds of an all-reduce between `ranks`, for each size in bytes; none if this rank is not one of them."""
        group = self._group(ranks)
        return [self._seconds(group, size) for size in sizes] if self.rank in ranks else []

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def reduce(self, buffer: Any, group: Any) -> None:
        import torch.distributed as dist

        dist.all_reduce(buffer, group=group)

    def _seconds(self, group: Any, size: int) -> float:
        """The fastest of a few rounds, since other load can only add time."""
        import torch

        buffer = torch.zeros(max(1, size // 4), device=self.device)
        calls = min(CALLS[1], max(CALLS[0], ROUND_BYTES // size))
        return min([self._timed(buffer, group, calls) for _ in range(ROUNDS)][1:])

    def _timed(self, buffer: Any, group: Any, calls: int) -> float:
        self.reduce(buffer[:1], group)  # the others are ready too
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            self.reduce(buffer, group)
        self._wait()
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def _group(self, ranks: Sequence[int]) -> Any:
        """Process group of some ranks, which only they create: with thousands of pairs, all ranks could not create all groups.

        Its ranks find each other by a name that torch makes of them and of the number of groups that a rank has. So a rank that
        pauses creates a group of its own, and the numbers stay equal."""
        import torch.distributed as dist

        if len(ranks) == self.ranks:
            return None
        return dist.new_group(list(ranks) if self.rank in ranks else [self.rank], use_local_synchronization=True)


def lockable_memory(status: Path = Path("/proc/self/status")) -> int | None:
    """Bytes of memory that this process may lock; None without limit.

    RDMA locks its buffers. A capability that a manifest adds is effective for root only, so the effective set decides."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    effective = next(line for line in status.read_text().splitlines() if line.startswith("CapEff:"))
    may_lock = int(effective.split()[1], 16) >> IPC_LOCK & 1
    return None if soft == resource.RLIM_INFINITY or may_lock else soft
