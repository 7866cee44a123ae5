"""Report of a training plan: verdict, memory, communication, step time breakdown and cost."""

from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from strata.planner.cli.tables import failures_line, grid
from strata.planner.layout import Layout
from strata.planner.memory.plan import StageMemory
from strata.planner.plan import TrainingPlan
from strata.planner.step.communication import Exchange
from strata.planner.step.step import Step
from strata.planner.units import dollars, share, short, show
from strata.planner.validation.trust import Trust

BAR = 16  # characters
WATERFALL = 44
# Entries of a step's breakdown with the exposed communication of each dimension.
SEEN = {
    "tensor": ("tensor parallelism",),
    "sequence": ("sequence parallelism",),
    "context": ("sequence parallelism",),
    "expert": ("expert parallelism",),
    "data": ("data parallelism", "parameters gathered"),
}


def report(plan: TrainingPlan, trust: Trust) -> list[RenderableType]:
    parts: list[RenderableType] = [headline(plan), verdict(plan), *doubt(trust), memory(plan)]
    if plan.step.exchanges:
        parts.append(communication(plan.step))
    parts.append(waterfall(plan.step))
    parts.append(Text("\n".join([failures_line(plan.failures), *budget_lines(plan)])))
    return parts


def headline(plan: TrainingPlan) -> Text:
    shape, layout = plan.shape, plan.layout
    active = f", {short(shape.active_parameters())} active" if shape.experts else ""
    text = Text(f"{shape.name} ({short(shape.parameters())} parameters{active})", "bold")
    text.append(f" on {layout.gpus:,} {plan.gpu.name} over {plan.fabric.name}, trained by {plan.software.name}\n", "not bold")
    text.append(describe(layout), "not bold")
    tokens = layout.batch * plan.sequence
    text.append(f"\n{layout.batch:,} sequences of {plan.sequence:,} tokens per step ({short(tokens)})", "not bold")
    count = layout.micro_batches
    text.append(f", in {count:,} micro-batch{'es' * (count > 1)} of {layout.micro_batch}", "not bold")
    return text


def describe(layout: Layout) -> str:
    cut = " x ".join(
        f"{name} {value}"
        for name in ("data", "tensor", "pipeline", "sequence", "context")
        if (value := getattr(layout, name)) > 1
    )
    words = [cut or "one GPU"]
    if layout.pipeline > 1:
        words[0] += f" ({layout.schedule}" + (f", {layout.interleave} chunks)" if layout.interleave > 1 else ")")
    words += [f"expert {layout.expert}"] if layout.expert > 1 else []
    words += [f"ZeRO {layout.zero}", layout.precision, f"{layout.recompute} recompute".replace("none", "no")]
    words += ["sequence-parallel"] if layout.sequence_parallel else []
    words += [f"{layout.offload} offloaded".replace("all ", "all state ")] if layout.offload != "none" else []
    return ", ".join(words)


def verdict(plan: TrainingPlan) -> Text:
    step, held = plan.step, plan.memory
    spare = held.capacity - held.peak
    full = f"{show(held.peak, 'B')} of {show(held.capacity, 'B')} ({share(held.peak / held.capacity)})"
    used = f"{full} at stage {held.fullest.stage}"
    text = Text("fits", "bold green") if held.fits else Text("does not fit", "bold red")
    rest = f"{show(spare, 'B')} left" if held.fits else f"{show(-spare, 'B')} too much"
    text.append(f": {used}, {rest}\n", "default not bold")
    text.append(f"step {show(step.seconds, 's')}", "bold default")
    figures = (
        f"{short(step.tokens_per_s)} tokens/s ({step.tokens_per_s / plan.layout.gpus:,.0f} per GPU)",
        f"MFU {share(step.mfu)}",
        f"HFU {share(step.hfu)}",
        f"limited by {step.limit} ({share(step.spent[step.limit] / step.seconds)})",
    )
    text.append("".join(f" · {figure}" for figure in figures), "default not bold")
    return text


def doubt(trust: Trust) -> list[RenderableType]:
    """Expected error of the plan; empty in the validated regime."""
    return [] if trust.validated else [trust.line]


def memory(plan: TrainingPlan) -> Table:
    """Memory table. Stages with equal content are one row."""
    held = plan.memory
    names = [name for name, value in columns(held.stages[0]).items() if name != "host" or value]
    table = grid("memory per GPU", ["stage"], [*names, "total"])
    table.add_column(f"of {show(held.capacity, 'B')}")
    rows = groupby(held.stages, key=lambda stage: tuple(round(value) for value in columns(stage).values()))
    for _, group in rows:
        stages = list(group)
        first, last = stages[0], stages[-1]
        name = f"{first.stage}" if first is last else f"{first.stage} to {last.stage}"
        values, full = columns(first), first.total / held.capacity
        cells = [show(values[each], "B") if values[each] else "-" for each in names]
        table.add_row(name, *cells, Text(show(first.total, "B"), "bold"), Text(bar(full, BAR), "red" if full > 1 else "green"))
    return table


def columns(stage: StageMemory) -> dict[str, float]:
    """Memory terms as columns. Allocator fragmentation and runtime are one column; host memory is not in the total."""
    terms = dict(stage.terms)
    terms["allowance"] = terms.pop("gaps") + terms.pop("runtime")
    return {**terms, "host": stage.host}


def bar(part: float, width: int) -> str:
    eighths = round(min(part, 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    drawn = "█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return drawn + "·" * (width - len(drawn)) + (f" {part:.0%}" if part > 1 else "")


def communication(step: Step) -> Table:
    note = "sent: bytes of one GPU. exposed: time not overlapped with compute; sends between stages are part of the pipeline"
    table = grid(
        "communication per step",
        ["dimension", "collective", "placement", "algorithm"],
        ["sent", "calls", "each", "total", "exposed"],
        note,
    )
    for dimension, group in groupby(step.exchanges, key=lambda each: each.dimension):
        members = list(group)
        seen = exposed(step, dimension)
        for number, each in enumerate(members):
            table.add_row(
                "" if number else dimension,
                each.kind.replace("_", "-"),
                where(each),
                each.algorithm.replace("_", " "),
                show(each.sent * each.times, "B"),
                f"{each.times:,.0f}",
                show(each.seconds, "s"),
                show(each.seconds * each.times, "s"),
                "" if number or seen is None else show(seen, "s"),
            )
    return table


def exposed(step: Step, dimension: str) -> float | None:
    names = SEEN.get(dimension)
    return sum(step.spent.get(name, 0.0) for name in names) if names else None


def where(each: Exchange) -> str:
    place = each.place
    if each.kind == "send":
        return "inside a domain" if place.domains == 1 else "between domains"
    if place.domains == 1:
        return f"{place.inside} inside a domain"
    if place.inside == 1:
        return f"between {place.domains} domains"
    return f"{place.inside} x {place.domains} domains"


def waterfall(step: Step) -> Table:
    """Breakdown of a step as a waterfall: each bar begins where the previous bar ends."""
    table = grid("step time breakdown", ["", ""], ["", ""])
    begun = 0.0
    for name, seconds in step.spent.items():
        if abs(seconds) < 0.0005 * step.seconds:
            continue
        start, end = round(begun / step.seconds * WATERFALL), round((begun + seconds) / step.seconds * WATERFALL)
        drawn = " " * min(start, end) + ("█" if seconds > 0 else "░") * max(abs(end - start), 1)
        table.add_row(name, Text(drawn, "blue"), show(seconds, "s"), share(seconds / step.seconds))
        begun += seconds
    table.add_row("step", "", Text(show(step.seconds, "s"), "bold"), "")
    return table


def budget_lines(plan: TrainingPlan) -> list[str]:
    budget = plan.budget
    if budget is None:
        return []
    return [
        f"{short(budget.tokens)} tokens: {budget.days:,.1f} days with failures ({budget.undisturbed_days:,.1f} without),"
        f" {budget.gpu_hours:,.0f} GPU-hours, {dollars(budget.dollars)} at {dollars(plan.gpu.dollars_per_hour)} per GPU-hour,"
        f" {budget.kilowatt_hours / 1000:,.1f} MWh (GPUs only)"
    ]
