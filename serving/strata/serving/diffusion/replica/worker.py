"""Worker process of a replica: loads the model and samples batches, together with the other workers of its group.

All workers receive every batch. Worker 0 reports to the replica. An error that is not the request's ends the process: after it
the workers may wait for different collectives, so the group is started anew.
"""

import ctypes
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from strata.platform.errors import UserError
from strata.platform.processes import PR_SET_PDEATHSIG
from strata.serving.api.pictures import PictureModel
from strata.serving.diffusion.parallel.group import ALONE, Group, check_layout, connect
from strata.serving.diffusion.pipeline import Pipeline, load_pipeline
from strata.serving.diffusion.replica.messages import (
    Batch,
    Cancel,
    Done,
    FromWorker,
    Ready,
    Refused,
    Step,
    Stopped,
    Unusable,
    Wanted,
)
from strata.serving.diffusion.replica.preview import Preview
from strata.serving.diffusion.replica.spec import PicturesSpec
from strata.serving.diffusion.sampling import Cancelled, Latents, Picture, sample
from strata.serving.diffusion.step_cache import StepCache


def main(rank: int, spec: PicturesSpec, meeting: str, replica: Connection) -> None:
    """Samples batches until the replica closes the connection. `meeting`: a file that the group's workers share."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; the replica drains first
    torch.set_num_threads(spec.threads)
    try:
        worker = _Worker(rank, spec, meeting, replica)
        worker.tell(worker.ready())
    except UserError as error:
        if rank == 0:
            replica.send(Unusable(error.cause, error.fix))
        return
    while True:
        try:
            message = replica.recv()
        except EOFError:
            return
        if isinstance(message, Batch):  # a Cancel may arrive after the end of its batch
            worker.tell(worker.sampled(message))


class _Worker:
    def __init__(self, rank: int, spec: PicturesSpec, meeting: str, replica: Connection) -> None:
        self._rank, self._replica = rank, replica
        device = f"cuda:{rank}" if spec.device == "gpu" else "cpu"
        if spec.device == "gpu":
            torch.cuda.set_device(rank)
        folder, self._step_cache = Path(spec.folder), spec.section.step_cache
        self._pipeline: Pipeline = load_pipeline(folder, device, getattr(torch, spec.dtype), spec.compiled)
        guided = not self._pipeline.family.distilled_guidance
        check_layout(
            spec.layout, self._pipeline.heads, self._pipeline.blocks, self._pipeline.grid(*self._pipeline.own_size), guided
        )
        self._tokenizer = _tokenizer(folder) if rank == 0 else None
        self._group: Group = ALONE
        if (workers := spec.layout.workers) > 1:
            limit = timedelta(seconds=spec.section.step_timeout_s)
            backend = "nccl" if spec.device == "gpu" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=workers, timeout=limit)
            self._group = connect(spec.layout, timeout_s=spec.section.step_timeout_s)

    def tell(self, message: FromWorker) -> None:
        if self._rank == 0:
            self._replica.send(message)

    def ready(self) -> Ready:
        height, width = self._pipeline.own_size
        model = PictureModel(width, height, self._pipeline.multiple, self._pipeline.largest)
        return Ready(model, guides_twice=not self._pipeline.family.distilled_guidance)

    def sampled(self, batch: Batch) -> FromWorker:
        preview = Preview(self._pipeline, batch) if batch.partials and self._rank == 0 else None
        began = time.monotonic()

        def on_step(step: int, steps: int, latents: Latents) -> bool:
            nonlocal began
            partials: dict[int, np.ndarray] = {} if preview is None else preview.after(step, latents)
            now = time.monotonic()
            self.tell(Step(step, now - began, partials))
            began = now
            return not self._cancelled(batch.number)

        try:
            cache = StepCache(self._step_cache) if self._step_cache else None
            pictures = sample(self._pipeline, [_picture(wanted) for wanted in batch.pictures], on_step, self._group, cache)
        except Cancelled:
            return Stopped()
        except UserError as error:
            return Refused(f"{error.cause} {error.fix}")
        return Done(tuple(pictures), tuple(self._tokens(wanted.prompt) for wanted in batch.pictures))

    def _cancelled(self, number: int) -> bool:
        """True if the replica has cancelled this batch. Nothing else arrives while a batch runs."""
        while self._replica.poll():
            message = self._replica.recv()
            if isinstance(message, Cancel) and message.number == number:
                return True
        return False

    def _tokens(self, prompt: str) -> int:
        return 1 if self._tokenizer is None else len(self._tokenizer(prompt, truncation=True).input_ids)


def _picture(wanted: Wanted) -> Picture:
    return Picture(
        prompt=wanted.prompt,
        negative=wanted.negative,
        width=wanted.width,
        height=wanted.height,
        steps=wanted.steps,
        guidance=wanted.guidance,
        seed=wanted.seed,
    )


def _tokenizer(folder: Path) -> Any | None:
    """Counts the tokens of prompts. None for a model of classes."""
    if not (folder / "tokenizer").is_dir():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
