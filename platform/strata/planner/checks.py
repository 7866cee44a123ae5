"""Checks of layouts: an impossible layout is refused with the nearest possible one."""

from strata.planner import ranges
from strata.planner.catalogue.shape import Shape
from strata.planner.layout import Layout
from strata.planner.pipeline.schedules import refusal
from strata.planner.step.stages import parts_of
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Gpu


def check(shape: Shape, layout: Layout, sequence: int, gpu: Gpu) -> None:
    _check_counts(layout, sequence)
    _check_cut(shape, layout, sequence)
    _check_experts(shape, layout)
    _check_batch(layout)
    if layout.pipeline > 1:
        refused = refusal(layout.schedule, layout.pipeline, layout.micro_batches, layout.interleave)
        if refused:
            raise UserError(refused.cause, f"{refused.fix}. Stages are --pipeline, micro-batches --batch / (data x micro-batch).")
    elif layout.interleave > 1 and layout.schedule == "interleaved":
        raise UserError("There is nothing to interleave in one stage.", "Give --pipeline 2 or more, or leave --interleave out.")
    if layout.precision not in gpu.flops:
        raise UserError(f"{gpu.name} does not compute in {layout.precision}.", f"Use --precision {' or '.join(gpu.flops)}.")


def data_of(gpus: int, layout: Layout) -> int:
    """Data-parallel ranks that remain for this number of GPUs."""
    cut = layout.tensor * layout.pipeline * layout.sequence * layout.context
    if gpus < 1 or gpus % cut:
        nearest = max(1, round(gpus / cut)) * cut
        raise UserError(
            f"{gpus} GPUs are not a multiple of tensor x pipeline x sequence x context = {cut}.", f"--gpus {nearest} works."
        )
    return gpus // cut


def _check_counts(layout: Layout, sequence: int) -> None:
    """Checks counts of a recipe, which no command-line option has checked."""
    for name, within in ranges.LAYOUT.items():
        within.check(f"--{name.replace('_', '-')}", getattr(layout, name))
    ranges.SEQUENCE.check("--seq", sequence)
    if layout.gpus not in ranges.GPUS:
        raise UserError(
            f"data x tensor x pipeline x sequence x context = {layout.gpus:,} GPUs are more than a plan can be made for.",
            f"Lower one of them: {ranges.GPUS.most:,} GPUs are the most.",
        )


def _check_cut(shape: Shape, layout: Layout, sequence: int) -> None:
    if shape.heads % layout.tensor:
        nearest = _divisor_below(shape.heads, layout.tensor)
        raise UserError(
            f"--tensor {layout.tensor} does not divide the {shape.heads} heads of {shape.name}.", f"--tensor {nearest} works."
        )
    if shape.kv_heads % layout.tensor and layout.tensor % shape.kv_heads:
        nearest = _divisor_below(shape.kv_heads, layout.tensor)
        raise UserError(
            f"--tensor {layout.tensor} and the {shape.kv_heads} key/value heads of {shape.name} do not divide each other.",
            f"--tensor {nearest} works.",
        )
    heads = shape.heads // layout.tensor
    if heads % layout.sequence:
        nearest = _divisor_below(heads, layout.sequence)
        raise UserError(
            f"--sequence {layout.sequence} does not divide the {heads} heads that --tensor {layout.tensor} leaves a GPU.",
            f"--sequence {nearest} works; --context has no such limit.",
        )
    if layout.sequence_parallel and layout.tensor == 1:
        raise UserError("--sequence-parallel splits what tensor-parallel GPUs share, and --tensor is 1.", "Raise --tensor.")
    sharers = layout.sequence * layout.context
    if sequence % sharers:
        raise UserError(
            f"--seq {sequence} is not a multiple of sequence x context = {sharers}.",
            f"--seq {max(1, round(sequence / sharers)) * sharers} works.",
        )
    check_positions(shape, sequence)
    if parts_of(layout) > shape.layers:
        raise UserError(
            f"{shape.layers} layers cannot be cut into {parts_of(layout)} parts (pipeline x chunks of a stage).",
            "Lower --pipeline or --interleave.",
        )


def check_positions(shape: Shape, sequence: int) -> None:
    if shape.positions and sequence > shape.context:
        raise UserError(
            f"--seq {sequence} is more than the {shape.context} positions that {shape.name} has learned.",
            f"--seq {shape.context} works.",
        )


def _check_experts(shape: Shape, layout: Layout) -> None:
    if layout.expert == 1:
        return
    if shape.experts is None:
        raise UserError(f"{shape.name} has no experts to spread over {layout.expert} GPUs.", "Leave --expert out.")
    if shape.experts.count % layout.expert:
        nearest = _divisor_below(shape.experts.count, layout.expert)
        raise UserError(
            f"--expert {layout.expert} does not divide the {shape.experts.count} experts of {shape.name}.",
            f"--expert {nearest} works.",
        )
    peers = layout.data * layout.sequence * layout.context
    if peers % layout.expert:
        nearest = _divisor_below(peers, layout.expert)
        raise UserError(
            f"--expert {layout.expert} does not divide the {peers} GPUs that hold the same layers (data x sequence x context).",
            f"--expert {nearest} works.",
        )


def _check_batch(layout: Layout) -> None:
    share = layout.data * layout.micro_batch
    if layout.batch % share:
        nearest = max(1, round(layout.batch / share)) * share
        raise UserError(
            f"--batch {layout.batch} is not a multiple of data x micro-batch = {share} sequences.", f"--batch {nearest} works."
        )


def _divisor_below(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
