"""Tables of schedules, failures, serving and the catalogue."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from strata.planner.catalogue import library
from strata.planner.catalogue.fleets import FLEETS
from strata.planner.catalogue.software import PROGRAMS
from strata.planner.pipeline.simulate import Simulation
from strata.planner.reliability.failures import FailurePlan
from strata.planner.serving.capacity import Pool, ServingPlan
from strata.planner.units import dollars, share, short, show
from strata.platform.hardware import catalogue as hardware


class Grid(Table):
    """Table without borders, with a heading and a note that may be wider than its columns."""

    def __init__(self, heading: str, note: str, titled: bool) -> None:
        super().__init__(box=None, show_header=titled, header_style="dim", pad_edge=False)
        self.heading, self.note = heading, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading, "bold")
        yield from super().__rich_console__(console, options)
        if self.note:
            yield Text(self.note, "dim")


def grid(heading: str, left: Sequence[str], right: Sequence[str] = (), note: str = "") -> Grid:
    """Table with `left` aligned columns for text and `right` aligned columns for figures."""
    table = Grid(heading, note, any((*left, *right)))
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def schedules(found: list[Simulation], chosen: str) -> Table:
    note = "in flight: peak number of micro-batches whose activations a stage holds, maximum over stages"
    table = grid("schedules compared", ["schedule"], ["time", "bubble", "in flight", "chunks per stage"], note)
    for one in found:
        style = "bold" if one.schedule == chosen else ""
        cells = (show(one.total, "s"), share(one.bubble), f"{max(one.in_flight):g}", f"{one.interleave}")
        table.add_row(one.schedule, *cells, style=style)
    return table


def failures_line(plan: FailurePlan) -> str:
    best = plan.best
    steps = f"{best.interval_steps:,} step{'s' * (best.interval_steps != 1)}"
    spares = f"{plan.spares} spare node{'s' * (plan.spares != 1)}"
    return (
        f"MTBF {show(plan.mtbf_s, 's')}; best checkpoint interval {show(best.interval_s, 's')} ({steps}, {best.mode});"
        f" goodput {share(plan.goodput)} with {spares}"
    )


def failures(plan: FailurePlan) -> Table:
    table = grid(
        "checkpoint modes at their best interval",
        ["mode"],
        ["interval", "steps", "Young", "Daly", "stall", "restart", "goodput"],
    )
    for mode, saving in plan.savings.items():
        worksheet = saving.worksheet
        table.add_row(
            mode,
            show(saving.interval_s, "s"),
            f"{saving.interval_steps:,}",
            *(show(worksheet[name], "s") for name in ("young_s", "daly_s", "stall_s", "back_s")),
            share(saving.goodput),
            style="bold" if saving is plan.best else "",
        )
    return table


def failures_money(plan: FailurePlan) -> str:
    lines = [
        f"save of {show(plan.worksheet['state_bytes'], 'B')}: {show(plan.save_s, 's')}; {plan.spares} spare nodes suffice"
        f" {share(plan.available)} of the time; goodput per paid GPU {share(plan.goodput_per_paid_gpu)}"
    ]
    if plan.dollars_per_useful_hour:
        lines.append(f"cost per hour of useful work: {dollars(plan.dollars_per_useful_hour)} on demand")
        if plan.spot_dollars_per_useful_hour is not None:
            lines[-1] += f", {dollars(plan.spot_dollars_per_useful_hour)} on spot instances"
    return "\n".join(lines)


def engine(plan: ServingPlan, gpu: str, tensor: int) -> Table:
    table = grid(f"one replica: {tensor} x {gpu}", ["", ""])
    for name, value in (
        ("weights per GPU", show(plan.weights_bytes, "B")),
        ("KV cache per token and GPU", show(plan.kv_bytes_per_token, "B")),
        ("sequences that fit", f"{plan.batch_that_fits:,}"),
        ("largest output throughput", f"{plan.tokens_per_s:,.0f} tokens/s"),
        (f"prefill of {plan.load.prompt:,} tokens", show(plan.prefill_s, "s")),
        ("KV transfer of this prompt", show(plan.transfer_s, "s")),
    ):
        table.add_row(name, value)
    return table


def pools(plan: ServingPlan) -> Table:
    """Aggregated and disaggregated serving side by side."""
    found = [pool for pool in (plan.aggregated, plan.disaggregated) if pool]
    if plan.disaggregated is None:
        remark = "disaggregated engines cannot meet these objectives"
    elif plan.remote_from is None:
        remark = "remote prefill pays off for no prompt length"
    else:
        remark = f"remote prefill pays off from prompts of {plan.remote_from:,} tokens"
    table = grid(f"replicas for {plan.load.requests_per_s:g} requests/s", [""], [pool.kind for pool in found], remark)
    rows: list[tuple[str, list[str]]] = [
        ("replicas", [_replicas(pool) for pool in found]),
        ("GPUs", [f"{pool.gpus:,}" for pool in found]),
        ("sequences per decode engine", [f"{pool.batch:.1f}" for pool in found]),
        ("TTFT p50", [show(pool.ttft_p50_s, "s") for pool in found]),
        ("TTFT p99", [show(pool.ttft_p99_s, "s") for pool in found]),
        ("ITL mean", [show(pool.itl_s, "s") for pool in found]),
        ("ITL during a prefill", [show(pool.itl_worst_s, "s") for pool in found]),
        ("cost per million tokens, prompt and output", [dollars(pool.dollars_per_million_tokens) for pool in found]),
        ("cost per million output tokens", [dollars(pool.dollars_per_million_output_tokens) for pool in found]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _replicas(pool: Pool) -> str:
    if pool.kind == "aggregated":
        return f"{pool.decode_replicas}"
    return f"{pool.prefill_replicas} prefill : {pool.decode_replicas} decode"


def models() -> Table:
    table = grid("models", ["name"], ["parameters", "active", "layers", "hidden", "heads", "KV heads", "context"])
    for name in library.model_names():
        one = library.model(name)
        active = short(one.active_parameters()) if one.experts else "-"
        figures = (one.layers, one.hidden, one.heads, one.kv_heads, one.context)
        table.add_row(name, short(one.parameters()), active, *(f"{figure:,}" for figure in figures))
    return table


def gpus() -> Table:
    table = grid("GPUs", ["name"], ["bf16", "fp8", "memory", "bandwidth", "link", "domain", "$/h", "power"])
    for name in hardware.gpu_names():
        one = hardware.gpu(name)
        table.add_row(
            name,
            *(show(one.flops[kind], "FLOP/s") if kind in one.flops else "-" for kind in ("bf16", "fp8")),
            show(one.memory, "B"),
            show(one.bandwidth, "B/s"),
            show(one.link, "B/s"),
            f"{one.domain}",
            f"{one.dollars_per_hour:.2f}",
            f"{one.watts:.0f} W",
        )
    return table


def fabrics() -> Table:
    table = grid("networks between NVLink domains", ["name", "kind", "topology"], ["cards", "each", "oversubscription"])
    for name in hardware.fabric_names():
        one = hardware.fabric(name)
        table.add_row(name, one.kind, one.topology, f"{one.nics}", f"{one.nic * 8 / 1e9:g} Gb/s", f"{one.oversubscription:g}")
    return table


def programs() -> Table:
    table = grid("training programs", ["name", "description"])
    for name, one in PROGRAMS.items():
        table.add_row(name, one.why)
    return table


def fleets() -> Table:
    table = grid("fleets with published failure rates", ["name", "source"], ["GPU-hours between failures"])
    for name, one in FLEETS.items():
        table.add_row(name, one.source, f"{1 / one.total:,.0f}")
    return table
