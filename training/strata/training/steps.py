"""Optimizer steps and evaluation on DeepSpeed's engines, with and without a pipeline."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.batch import Batch
from strata.training.layout import place
from strata.training.metrics.stopwatch import Stopwatch
from strata.training.model.rope import document_bounds
from strata.training.parallel.data import gradient_scale

Batches = Iterator[Batch]


class Whole:
    """Steps of an engine with all layers: forward, backward, step. With sequence parallelism, its input is a slice of each
    sequence, with positions relative to the whole sequence."""

    def __init__(self, engine: Any, model: ModelSection, parallel: ParallelSection, watch: Stopwatch) -> None:
        self._engine, self._watch = engine, watch
        tokens = model.context // parallel.sequence
        begin = place(engine.global_rank, parallel).sequence * tokens
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

    def _loss(self, batch: Batch) -> Tensor:
        positions, bounds = self._positions_t, None
        if batch.positions_bt is not None:
            positions, bounds = batch.positions_bt[:, self._slice], document_bounds(batch.positions_bt)
        tokens_bt, targets_bt = batch.tokens_bt[:, self._slice], batch.targets_bt[:, self._slice]
        # As separate arguments: DeepSpeed compares them between tensor-parallel ranks, and cannot compare tuples.
        answers = batch.answers.tensors(self._slice) if batch.answers else ()
        # A tensor: torch.compile would make a number that changes from step to step a constant of the graph, or compute with it on
        # the CPU.
        count = torch.full((), batch.count, device=self._engine.device)
        loss: Tensor = self._engine(tokens_bt, positions, targets_bt, count, bounds, *answers)
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


def stage_inputs(batches: Batches) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
    """Inputs of the first stage and labels of the last, as DeepSpeed's pipeline takes them."""
    for batch in batches:
        tokens_bt, positions_bt = batch.tokens_bt, batch.positions_bt
        inputs = tokens_bt if positions_bt is None else (tokens_bt, positions_bt)
        answers = batch.answers.tensors() if batch.answers else ()
        yield inputs, (batch.targets_bt, torch.tensor(batch.count, device=tokens_bt.device), *answers)


def _timed(watch: Stopwatch, phase: str, run: Callable[..., None], engine: Any, /, **kwargs: Any) -> None:
    with watch.phase(phase):
        run(engine, **kwargs)
