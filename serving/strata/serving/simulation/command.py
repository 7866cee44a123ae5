"""The command `strata simulate`. Light imports only: the command line loads this module for its help."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from strata.planner import ranges
from strata.planner.cli.options import GPU, FabricName, GpuName, Json, Model, answer, number, open_fabric, open_gpu, open_model
from strata.platform.errors import UserError, shown

if TYPE_CHECKING:
    from rich.table import Table

    from strata.serving.scaling.sizing import Slo
    from strata.serving.simulation.endpoint import Kill
    from strata.serving.simulation.planned import Model as EngineModel
    from strata.serving.simulation.requests import Request
    from strata.serving.simulation.results import Results
    from strata.serving.simulation.routing.chooser import Routing

Precision = Literal["fp16", "bf16", "fp8"]
Link = Literal["fabric", "nvlink", "pcie"]
Arrivals = Literal["poisson", "bursts", "diurnal", "steps", "ramp", "night"]
Policy = Literal["slo", "ray-default", "fixed"]
REPLICAS, TOKENS = ranges.Range(0, 10_000), ranges.Range(1, 10_000_000)
REQUESTS = ranges.Range(1, 100_000_000)
SECONDS = ranges.Range(1e-4, 3600)
BLOCK = 16  # tokens, vLLM's default on GPUs
SEQUENCES = 256
LOAD, ENGINE, FAILURES, SCALING = "Load", "Engines", "Failures", "Autoscaling"
ROUTINGS = ("kv", "least-busy", "oracle")


def simulate(
    ctx: typer.Context,
    model: Model = None,
    calibration: Annotated[Path | None, typer.Option(help="Step times of a measured engine (JSON), instead of --model.")] = None,
    decode: Annotated[int, number("Decode replicas; with --scale the least, from 0 on.", REPLICAS, "--decode")] = 1,
    prefill: Annotated[int, number("Prefill replicas, at least; 0: aggregated serving.", REPLICAS, "--prefill")] = 0,
    routing: Annotated[
        str,
        typer.Option(help="Choice of decode replicas: kv, least-busy or oracle (knows every cache). Several: compared."),
    ] = "kv",
    trace: Annotated[
        Path | None, typer.Option(help="Replay a Mooncake trace (*.jsonl) or an Azure trace (*.csv).", rich_help_panel=LOAD)
    ] = None,
    speed: Annotated[float, number("Speed of the trace's replay.", ranges.Range(1e-3, 1e6), panel=LOAD)] = 1.0,
    arrivals: Annotated[Arrivals, typer.Option(help="Arrivals of a generated load.", rich_help_panel=LOAD)] = "poisson",
    rate: Annotated[float, number("Requests per second of a generated load.", ranges.RATE, panel=LOAD)] = 10.0,
    concurrency: Annotated[
        int | None, number("Clients that send one request after the other, instead of --rate.", REQUESTS, panel=LOAD)
    ] = None,
    requests: Annotated[int | None, number("Requests. Default: 1,000, or all of a trace.", REQUESTS, panel=LOAD)] = None,
    hours: Annotated[
        float | None, number("Simulated hours of a generated load, instead of --requests.", ranges.Range(1e-3, 1e4), panel=LOAD)
    ] = None,
    prompt: Annotated[int, number("Mean prompt tokens.", TOKENS, panel=LOAD)] = 1000,
    output: Annotated[int, number("Mean output tokens.", TOKENS, panel=LOAD)] = 300,
    variation: Annotated[float, number("Standard deviation of lengths over their mean.", ranges.VARIATION, panel=LOAD)] = 1.0,
    turns: Annotated[int, number("Requests of a conversation.", ranges.Range(1, 1000), panel=LOAD)] = 1,
    think: Annotated[float, number("Mean seconds between turns.", ranges.Range(0, 86_400), panel=LOAD)] = 10.0,
    shared: Annotated[int, number("Tokens of a system prompt before --prompt.", ranges.Range(0, 10_000_000), panel=LOAD)] = 0,
    openings: Annotated[int, number("Different system prompts.", ranges.Range(1, 1_000_000), panel=LOAD)] = 1,
    tenants: Annotated[
        str | None,
        typer.Option(
            help="Tenants with their loads in multiples of their share of --rate or --concurrency, such as quiet=1,loud=10; "
            "with weights: quiet=1:2,loud=10:1.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the load and of the routing's ties.", min=0, rich_help_panel=LOAD)] = 0,
    gpu: GpuName = GPU,
    fabric: FabricName = None,
    tensor: Annotated[int, number("GPUs per replica.", ranges.LAYOUT["tensor"], panel=ENGINE)] = 1,
    precision: Annotated[Precision, typer.Option(help="Precision of the weights.", rich_help_panel=ENGINE)] = "bf16",
    kv_precision: Annotated[Precision, typer.Option(help="Precision of the KV cache.", rich_help_panel=ENGINE)] = "bf16",
    link: Annotated[Link, typer.Option(help="Link for KV transfers.", rich_help_panel=ENGINE)] = "fabric",
    max_sequences: Annotated[
        int | None,
        number("Concurrent sequences per engine. Default: the calibration's, or 256.", ranges.MAX_SEQUENCES, panel=ENGINE),
    ] = None,
    max_queue: Annotated[int, number("Further sequences that may wait.", REPLICAS, panel=ENGINE)] = 256,
    step_tokens: Annotated[
        int | None,
        number("Tokens per step of a decode engine. Default: 8,192; 2,048 with prefill replicas.", TOKENS, panel=ENGINE),
    ] = None,
    block_size: Annotated[
        int | None,
        number("Tokens per KV block. Default: 16; 128 with prefill replicas.", ranges.Range(1, 65_536), panel=ENGINE),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse KV blocks of equal prefixes.", rich_help_panel=ENGINE)] = True,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="Kill a replica: POOL:INDEX@SECONDS, such as decode:0@60. Repeatable.", rich_help_panel=FAILURES),
    ] = None,
    recovery: Annotated[
        float, number("Seconds until a killed replica is replaced.", ranges.Range(0, 86_400), panel=FAILURES)
    ] = 60.0,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(get_args(Policy)),
            help="Scale by SLO, by Ray Serve's default policy, or run the most replicas. Repeatable: compared on one load.",
            rich_help_panel=SCALING,
        ),
    ] = None,
    slo_ttft: Annotated[float | None, number("Seconds to the first token.", SECONDS, panel=SCALING)] = None,
    slo_itl: Annotated[float | None, number("Seconds per further token.", SECONDS, panel=SCALING)] = None,
    max_decode: Annotated[int | None, number("Most decode replicas.", ranges.Range(1, 10_000), panel=SCALING)] = None,
    max_prefill: Annotated[int | None, number("Most prefill replicas.", ranges.Range(1, 10_000), panel=SCALING)] = None,
    startup: Annotated[float, number("Seconds until a new replica answers.", ranges.Range(0, 86_400), panel=SCALING)] = 60.0,
    json: Json = None,
) -> None:
    """Simulate an endpoint under a generated load or a trace: throughput, latencies, cache hits and use of every pool."""
    from dataclasses import replace
    from math import inf

    from strata.serving.simulation import calibration as calibrations
    from strata.serving.simulation import generated, planned, traces
    from strata.serving.simulation.endpoint import Setup, Simulation
    from strata.serving.simulation.engine import EngineSettings
    from strata.serving.simulation.scaling.choices import Choices
    from strata.serving.simulation.tenants import merged
    from strata.serving.simulation.tenants import parse as parse_tenants
    from strata.serving.spec import DECODE_STEP_TOKENS, TRANSFERRED_BLOCK

    if ctx.invoked_subcommand is not None:
        return
    if ctx.args:
        raise UserError(f"{shown(' '.join(ctx.args))} is no option of 'strata simulate'.", "See 'strata simulate --help'.")
    if (model is None) == (calibration is None):
        raise UserError("One of --model and --calibration is needed.", "Set --model to a name from 'strata plan list'.")
    if trace is not None and tenants is not None:
        raise UserError("--trace excludes --tenants: traces have none.", "Omit one of them.")
    senders = parse_tenants(tenants) if tenants else []
    if trace is not None and concurrency is not None:
        raise UserError("--trace excludes --concurrency.", "Omit one of them.")
    if hours is not None and (trace is not None or concurrency is not None or requests is not None):
        raise UserError("--hours excludes --trace, --concurrency and --requests.", "Omit it.")
    routings = _routings(routing)
    kills = [_kill(text, {"decode": decode, "prefill": prefill}) for text in kill or []]
    if calibration is not None:
        found = calibrations.load(calibration)
        engine = planned.calibrated(found)
        max_sequences, block_size = max_sequences or found.max_sequences or SEQUENCES, block_size or found.block_size
    else:
        card, max_sequences = open_gpu(gpu, None), max_sequences or SEQUENCES
        engine = planned.plan(
            open_model(model), card, open_fabric(fabric, card), link, tensor, precision, kv_precision, max_sequences
        )
    block_size = block_size or (TRANSFERRED_BLOCK if prefill else BLOCK)
    settings = EngineSettings(
        blocks=_blocks(engine, block_size),
        block_size=block_size,
        max_sequences=max_sequences,
        step_tokens=max(engine.step_tokens, max_sequences),
        prefix_caching=prefix_caching,
        async_scheduling=engine.async_scheduling,
    )
    decode_tokens = step_tokens or (DECODE_STEP_TOKENS if prefill else engine.step_tokens)
    setup = Setup(
        times=engine.times,
        decode_replicas=decode,
        decode_engine=replace(settings, step_tokens=max(decode_tokens, max_sequences)),
        max_queue=max_queue,
        context=engine.context,
        request_s=engine.request_s,
        request_spread=engine.request_spread,
        front_request_s=engine.front_request_s,
        front_token_s=engine.front_token_s,
        prefill_replicas=prefill,
        prefill_engine=settings,
        handoff_s=engine.handoff_s,
        transfer_token_s=engine.transfer_token_s,
        kills=kills,
        recovery_s=recovery,
        tenants={sender.tenant.name: sender.tenant for sender in senders},
    )
    setups = Choices(
        _policies(scale or []), _slo(slo_ttft, slo_itl), {"decode": max_decode, "prefill": max_prefill}, startup
    ).setups(setup)
    if len(setups) > 1 and len(routings) > 1:
        raise UserError("Several policies of --scale exclude several of --routing.", "Name one of either.")
    runs = {
        routing if len(routings) > 1 else name: replace(each, routing=routing)
        for name, each in setups.items()
        for routing in routings
    }
    shape = generated.Shape(prompt, output, variation, shared, openings, turns, think)
    total = requests or (None if trace else int(rate * hours * 3600) if hours else 1000)
    if trace is not None:
        traces.format_of(trace)

    def generated_load(share: float, seed: int) -> "Iterator[tuple[float, Request]]":
        count = max(1, round((requests or 1000) * share))
        if concurrency is not None:
            return generated.closed_loop(max(1, round(concurrency * share)), count, shape, block_size, seed)
        length = (None, hours * 3600) if hours else (count, inf)
        return generated.open_loop(arrivals, rate * share, length[0], shape, block_size, seed, length[1])

    def load() -> "Iterator[tuple[float, Request]]":
        if trace is not None:
            return traces.replay(trace, block_size, requests, speed)
        if senders:
            return merged(senders, lambda share, number: generated_load(share, seed + number))
        return generated_load(1.0, seed)

    results = {}
    for name, each in runs.items():
        with _progress(total) as advance:
            results[name] = Simulation(each, seed).run(load(), advance)
    if len(results) == 1:
        (only,) = results.values()
        answer(lambda _: [_table(only)], only.summary, json)
        return
    summaries = {name: found.summary() for name, found in results.items()}
    compared = _routing_comparison if len(routings) > 1 else _scaling_comparison
    kind = "routings" if len(routings) > 1 else "policies"
    answer(lambda _: [compared(summaries)], lambda: {kind: summaries}, json)


def _policies(names: list[str]) -> tuple[Policy, ...]:
    for name in names:
        if name not in get_args(Policy):
            raise UserError(f"--scale {shown(name)} is no policy.", f"Choose from {', '.join(get_args(Policy))}.")
    return tuple(dict.fromkeys(names))  # type: ignore[arg-type]


def _slo(ttft_s: float | None, itl_s: float | None) -> "Slo | None":
    from strata.serving.scaling.sizing import Slo

    if ttft_s is None and itl_s is None:
        return None
    if ttft_s is None or itl_s is None:
        raise UserError("An SLO has --slo-ttft and --slo-itl.", "Set both.")
    return Slo(ttft_s, itl_s)


def _blocks(engine: "EngineModel", block_size: int) -> int:
    if blocks := engine.kv_tokens // block_size:
        return blocks
    raise UserError(
        f"The KV cache holds {engine.kv_tokens} tokens, and --block-size is {block_size}.", "Lower --block-size."
    )  # fmt: skip


def _kill(text: str, replicas: dict[str, int]) -> "Kill":
    from strata.serving.simulation.endpoint import Kill
    from strata.serving.simulation.replica import Role

    pool, colon, rest = text.partition(":")
    index, at, seconds = rest.partition("@")
    try:
        found, when = int(index), float(seconds)
    except ValueError:
        found, when = -1, -1.0
    if pool not in get_args(Role) or not colon or not at or not 0 <= found < replicas[pool] or not 0 <= when < float("inf"):
        raise UserError(
            f"--kill {shown(text)} names no replica and time.",
            "Write POOL:INDEX@SECONDS, such as decode:0@60, with a pool of decode and prefill and an index from 0 on.",
        )
    return Kill(when, pool, found)  # type: ignore[arg-type]


def _routings(text: str) -> "list[Routing]":
    names = [word.strip() for word in text.split(",")]
    if wrong := [name for name in names if name not in ROUTINGS]:
        raise UserError(f"There is no routing {shown(wrong[0])}.", f"Choose among {', '.join(ROUTINGS)}.")
    return list(dict.fromkeys(names))  # type: ignore[arg-type]


class _progress:
    """Progress bar on a terminal; nothing elsewhere."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        columns = ("simulated requests", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda done: self._bar.update(self._task, completed=done)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _table(results: "Results") -> "Table":
    from rich.table import Table

    found = results.summary()
    table = Table("figure", "value", title="Simulated endpoint")
    counts = found["requests"]
    rows: list[tuple[str, str]] = [
        ("simulated time", f"{found['simulated_s']:,.1f} s"),
        ("requests", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())),
        ("requests/s", f"{found['requests_per_s']:,.2f}"),
        ("input tokens/s", f"{found['input_tokens_per_s']:,.0f}"),
        ("output tokens/s", f"{found['output_tokens_per_s']:,.0f}"),
    ]
    for name, key in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("queue", "queue_s"), ("latency", "latency_s")):
        shares = ", ".join(f"{share} {_ms(value)}" for share, value in found[key].items())
        rows.append((name, shares))
    rows.append(("prefix cache", f"{found['prefix_hit_rate']:.1%} of prompt tokens hit"))
    rows.append(("routed by", ", ".join(f"{reason} {count:,}" for reason, count in found["routed"].items())))
    rows.append(("preemptions", f"{found['preemptions']:,}"))
    if found["retried"] or found["migrated"]:
        rows.append(("replicas lost", f"{found['retried']:,} requests retried, {found['migrated']:,} streams continued"))
    if len(found["prefills"]) > 1:
        rows.append(("prefills", ", ".join(f"{count:,} {name}" for name, count in found["prefills"].items())))
    if "slo" in found:
        rows.append(("SLO", f"{found['slo']['violations']:,} violations ({found['slo']['share']:.3%})"))
    for name, pool in found["pools"].items():
        if pool["replicas"]:
            use = f"{pool['utilisation']:.0%} busy, KV cache {pool['kv_use']:.0%} used (peak {pool['kv_use_peak']:.0%})"
            rows.append((f"{name} pool", f"{pool['replicas']} replicas, {pool['replica_hours']:,.1f} replica-hours, {use}"))
    for name, tenant in found["tenants"].items():
        latencies = (f"{key} p99 {_ms(tenant[f'{key.lower()}_s']['p99'])}" for key in ("TTFT", "ITL"))
        counts = f"{tenant['completed']:,} completed, {tenant['rejected']:,} rejected"
        rows.append((f"tenant {name}", ", ".join([counts, *latencies])))
    for row in rows:
        table.add_row(*row)
    return table


def _scaling_comparison(found: "Mapping[str, Mapping[str, Any]]") -> "Table":
    from rich.table import Table

    table = Table("policy", "replica-hours", "most replicas", "SLO violations", "TTFT p99", "ITL p99", title="Autoscaling")
    for name, each in found.items():
        pools = each["pools"].values()
        table.add_row(
            name,
            f"{sum(pool['replica_hours'] for pool in pools):,.1f}",
            " + ".join(str(pool["replicas"]) for pool in pools if pool["replicas"]),
            f"{each['slo']['violations']:,} of {each['requests']['sent']:,} ({each['slo']['share']:.3%})",
            _ms(each["ttft_s"]["p99"]),
            _ms(each["itl_s"]["p99"]),
        )
    return table


def _routing_comparison(found: "Mapping[str, Mapping[str, Any]]") -> "Table":
    from rich.table import Table

    table = Table("routing", "prefix hits", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "completed", title="Simulated endpoint")
    for name, each in found.items():
        latencies = (each[key][share] for key in ("ttft_s", "itl_s") for share in ("p50", "p99"))
        completed = f"{each['requests']['completed']:,}"
        table.add_row(name, f"{each['prefix_hit_rate']:.1%}", *(_ms(value) for value in latencies), completed)
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
