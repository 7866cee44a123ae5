"""Optimizer steps and evaluation on DeepSpeed's engines, with and without a pipeline."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.batch import Batch
from strata.training.layout import place
from strata.training.metrics.stopwatch import Stopwatch
from strata.training.model.rope import document_bounds
from strata.training.parallel.data import gradient_scale
from strata.training.targets import IGNORED

Batches = Iterator[Batch]


class Whole:
    """Steps of an engine with all layers: forward, backward, step. With sequence parallelism, its input is a slice of each
    sequence, with positions relative to the whole sequence."""

    def __init__(self, engine: Any, model: ModelSection, parallel: ParallelSection, watch: Stopwatch) -> None:
        self._engine, self._watch = engine, watch
        tokens = model.context // parallel.sequence
        self._part, self._parts = place(engine.global_rank, parallel).sequence, parallel.sequence
        begin = self._part * tokens
        self._slice = slice(begin, begin + tokens)
        self._scale = gradient_scale(parallel)
        self._positions_t = torch.arange(begin, begin + tokens, device=engine.device)

    def train(self, batches: Batches, count: int) -> Tensor:
        total = torch.zeros((), device=self._engine.device)
        for batch in batches:
            with self._watch.phase("forward"):
                loss = self._loss(batch)
            with self._watch.phase("backward"):
                self._engine.backward(loss * self._scale)
            with self._watch.phase("optimizer"):
                self._engine.step()
            total += loss.detach() / count
        return total

    @torch.no_grad()
    def evaluate(self, batches: Batches, count: int) -> Tensor:
        self._engine.eval()
        losses = []
        for batch in batches:
            with self._watch.phase("forward"):
                losses.append(self._loss(batch))
        self._engine.train()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def next_tokens(self, tokens_bt: Tensor, last_b: Tensor) -> Tensor:
        """Most probable token after the token `last_b` of each row. -1 if another sequence-parallel rank has that token."""
        width = tokens_bt.shape[1] // self._parts
        begin = self._part * width
        here_b = last_b - begin
        positions = torch.arange(begin, begin + width, device=tokens_bt.device)
        self._engine.eval()
        logits_bv = self._engine(tokens_bt[:, begin : begin + width], positions, last_b=here_b.clamp(0, width - 1))
        self._engine.train()
        return torch.where((here_b >= 0) & (here_b < width), logits_bv.argmax(-1), -1)

    def _loss(self, batch: Batch) -> Tensor:
        positions, bounds = self._positions_t, None
        if batch.positions_bt is not None:
            positions, bounds = batch.positions_bt[:, self._slice], document_bounds(batch.positions_bt)
        tokens_bt, targets_bt = batch.tokens_bt[:, self._slice], batch.targets_bt[:, self._slice]
        # As separate arguments: DeepSpeed compares them between tensor-parallel ranks, and cannot compare tuples.
        more = batch.loss_inputs(self._slice)
        # A tensor: torch.compile would make a changing number a constant of the graph, or compute with it on the CPU.
        count = torch.full((), batch.count, device=self._engine.device)
        loss: Tensor = self._engine(tokens_bt, positions, targets_bt, count, bounds, *more)
        return loss


class Flow(Whole):
    """Steps of a picture model's engine. The model itself takes this rank's slice of the patches."""

    def _loss(self, batch: Batch) -> Tensor:
        pictures = batch.pictures
        assert pictures
        counts_b = (batch.targets_bt[:, 0] != IGNORED).float()
        count = torch.full((), batch.count, device=self._engine.device)
        loss: Tensor = self._engine(pictures.pixels_bchw, pictures.noise_bchw, pictures.times_b, batch.tokens_bt, counts_b, count)
        return loss


class Stages:
    """Steps of a pipeline engine, which has one stage and runs the schedule itself."""

    def __init__(self, engine: Any, watch: Stopwatch) -> None:
        from deepspeed.runtime.pipe import schedule
        from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

        self._engine = engine
        self.whole_steps = isinstance(engine, DualPipeVEngine)
        phases = {schedule.ForwardPass: "forward", schedule.BackwardPass: "backward", schedule.OptimizerStep: "optimizer"}
        engine._INSTRUCTION_MAP = {
            instruction: partial(_timed, watch, phases[instruction], run) if instruction in phases else run
            for instruction, run in engine._INSTRUCTION_MAP.items()
        }

    def train(self, batches: Batches, count: int) -> Tensor:
        loss: Tensor = self._engine.train_batch(stage_inputs(batches))
        return loss.detach()

    def evaluate(self, batches: Batches, count: int) -> Tensor:
        """Mean loss. DualPipeV evaluates as many micro-batches at a time as a training step has: with any other number it mixes
        up its buffers."""
        size = self._engine.micro_batches if self.whole_steps else count
        inputs = stage_inputs(batches)
        losses = [self._engine.eval_batch(inputs, num_micro_batches=size) for _ in range(count // size)]
        return torch.stack(losses).mean()

    def next_tokens(self, tokens_bt: Tensor, last_b: Tensor, rows: int, positions: bool) -> Tensor:
        """Most probable token after the token `last_b` of each row, -1 on all stages but the last. Passes `rows` at a time, and
        positions if training does: stages expect tensors of the same shapes as in training."""
        found = []
        for begin in range(0, len(tokens_bt), rows):
            tokens, last = tokens_bt[begin : begin + rows], last_b[begin : begin + rows]
            short = rows - len(tokens)
            padded_bt, ignored_bt = F.pad(tokens, (0, 0, 0, short)), torch.full_like(tokens, IGNORED)
            at_bt = torch.arange(tokens.shape[1], device=tokens.device).expand_as(padded_bt) if positions else None
            batch = Batch(padded_bt, F.pad(ignored_bt, (0, 0, 0, short), value=IGNORED), at_bt, 1.0)
            _, head = self._engine.eval_batch(stage_inputs(iter([batch])), return_logits=True, num_micro_batches=1)
            if head is None:
                found.append(torch.full_like(last, -1))
                continue
            x_btd, weight_vd = head
            x_bd = x_btd[torch.arange(len(last), device=last.device), last]
            found.append(F.linear(x_bd, weight_vd).argmax(-1))  # a bound of the logits would not change their order
        return torch.cat(found)


def stage_inputs(batches: Batches) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
    """Inputs of the first stage and labels of the last, as DeepSpeed's pipeline takes them."""
    for batch in batches:
        tokens_bt, positions_bt = batch.tokens_bt, batch.positions_bt
        inputs = tokens_bt if positions_bt is None else (tokens_bt, positions_bt)
        yield inputs, (batch.targets_bt, torch.tensor(batch.count, device=tokens_bt.device), *batch.loss_inputs())


def _timed(watch: Stopwatch, phase: str, run: Callable[..., None], engine: Any, /, **kwargs: Any) -> None:
    with watch.phase(phase):
        run(engine, **kwargs)
