"""Asynchronous checkpoints of a running job, through Ray Train.

The training loop blocks only while the state is copied to the host. Ray's background thread writes, digests and uploads the
copy while the next steps run. There is one snapshot buffer: a save waits until the previous one is stored.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from strata.platform import file_errors
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.checkpoint import format, resharding
from strata.training.checkpoint.storage import Folder
from strata.training.parallel import optimizer_state

OTHER_RANKS_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Saved:
    """Newest complete checkpoint in storage. `at` is the Unix time at which it was complete, `seconds` the duration of the
    upload, None after a resume."""

    step: int
    size: int
    at: float
    seconds: float | None


Source = Literal["memory", "checkpoint"]


@dataclass(frozen=True)
class Resumed:
    """Step from which workers continue, and the source of their state. `seconds` is the time of the search and the load."""

    step: int
    source: Source
    seconds: float = 0.0


class Saver:
    def __init__(
        self,
        checkpoints: Folder,
        engine: Any,
        model: ModelSection,
        train: TrainSection,
        parallel: ParallelSection,
        origin: format.Origin,
        failed: Callable[[], None],
    ) -> None:
        self._checkpoints, self._engine, self._origin, self._failed = checkpoints, engine, origin, failed
        self._model, self._train, self._parallel = model, train, parallel
        self._buffers: list[Tensor] = []
        self._stored = threading.Event()
        self._stored.set()
        self.last: Saved | None = None
        self.problem: OSError | None = None  # a failure that the next save would meet too

    def resume(
        self,
        verified: str = "",
        expected: Callable[[], int] = lambda: 0,
        in_memory: format.Checkpoint | None = None,
    ) -> Resumed:
        """Loads the newest valid checkpoint, also after Ray restarted the workers. State `in_memory` is loaded instead if no
        complete checkpoint is newer; it is the same on all ranks, and verified.

        The ranks divide the digest checks among them and agree on the result; the driver has already checked the checkpoint with
        identity `verified`. A run that had a checkpoint, at step `expected()`, does not start over at step 0 when its storage is
        gone."""
        rank = dist.get_rank()
        found = in_memory if in_memory and self._stored_step() <= in_memory.step else None
        source: Source = "memory" if found else "checkpoint"
        found = found or self._newest_stored(verified)
        step = found.step if found else 0
        if found is None and (saved := expected()):
            cause = f"The run saved a checkpoint at step {saved}, but {self._checkpoints.path} has none now."
            raise UserError(cause, "Restore the checkpoints, or mount the storage that has them, and resume the run.")
        dist.barrier()  # rank 0 renames nothing while another rank still reads
        if rank == 0:
            format.set_aside_after(self._checkpoints, step)
        if found:
            optimizer_state.load(self._engine, self._model, self._parallel, resharding.Reader(found), step)
        stored = self._last_complete() if source == "memory" else found
        if stored and rank == 0:
            self.last = Saved(stored.step, stored.size, stored.whole_at() or time.time(), None)
        dist.barrier()
        return Resumed(step, source)

    def _stored_step(self) -> int:
        """Step of the newest complete checkpoint by its manifests, 0 for none. Rank 0 looks, so that all ranks decide alike."""
        stored = self._last_complete() if dist.get_rank() == 0 else None
        steps = [stored.step if stored else 0]
        dist.broadcast_object_list(steps, 0)
        return steps[0]

    def _last_complete(self) -> format.Checkpoint | None:
        for name in format.step_names(self._checkpoints):
            with suppress(format.Damaged):
                return format.examine(self._checkpoints / name)
        return None

    def _newest_stored(self, verified: str) -> format.Checkpoint | None:
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def check(found: format.Checkpoint) -> None:
            if found.identity == verified:
                return
            damage: str | None = None
            try:
                format.verify(found, found.manifests[rank::ranks])
            except format.Damaged as error:
                damage = str(error)
            damages: list[str | None] = [None] * ranks
            dist.all_gather_object(damages, damage)
            if any(damages):
                raise format.Damaged(next(filter(None, damages)))

        return format.newest(self._checkpoints, print if rank == 0 else lambda _: None, check)

    def save(self, step: int, val_loss: float | None, mode: Literal["async", "sync"]) -> float:
        """Saves a checkpoint. Called by all ranks. Returns the seconds for which the training loop was blocked."""
        import ray.train

        begin = time.perf_counter()
        self._stored.wait()
        self._stored.clear()
        snapshot = self._snapshot()
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def upload(_: Any, name: str) -> Any:
            folder = self._checkpoints / name
            try:
                storing = time.perf_counter()
                format.write(folder, rank, ranks, step, self._origin, val_loss, snapshot)
                if rank == 0:
                    _wait_for_others(folder, ranks)
                    seconds = time.perf_counter() - storing
                    if newest := format.prune(self._checkpoints, self._train.keep, self._train.keep_best):
                        self.last = Saved(newest.step, newest.size, newest.whole_at() or time.time(), seconds)
            except Exception as error:
                self._failed()
                if not isinstance(error, OSError) or file_errors.number_of(error) not in file_errors.LASTING:
                    raise  # Ray restarts all workers from the newest checkpoint
                self.problem = error  # ends the run: a full disk would still be full after a restart
            finally:
                self._stored.set()
            context = ray.train.get_context().get_storage()
            return ray.train.Checkpoint(folder.path, filesystem=context.storage_filesystem)

        upload_mode = ray.train.CheckpointUploadMode
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint(self._checkpoints.path, filesystem=self._checkpoints.filesystem),
            checkpoint_dir_name=format.folder_name(step),
            checkpoint_upload_mode=upload_mode.ASYNC if mode == "async" else upload_mode.SYNC,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,
        )
        return time.perf_counter() - begin

    def _snapshot(self) -> list[optimizer_state.Fragment]:
        """Copies the state to host buffers. Saves reuse the buffers, because page faults cost more than the copy."""
        parts = list(optimizer_state.fragments(self._engine, self._model, self._parallel))
        if not self._buffers:
            pin = parts[0].values.is_cuda if parts else False
            self._buffers = [torch.empty(part.values.shape, pin_memory=pin) for part in parts]
        for part, buffer in zip(parts, self._buffers, strict=True):
            buffer.copy_(part.values, non_blocking=True)
        if parts and parts[0].values.is_cuda:
            torch.cuda.synchronize()
        return [replace(part, values=buffer) for part, buffer in zip(parts, self._buffers, strict=True)]


def _wait_for_others(folder: Folder, ranks: int) -> None:
    """Waits on rank 0 for the other ranks' manifests, so that rank 0 reports this checkpoint now and not at the next save. Delays
    no step beyond the slowest rank. Has a time limit, because a rank may have died."""
    deadline = time.monotonic() + OTHER_RANKS_TIMEOUT_S
    while format.written(folder) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)
