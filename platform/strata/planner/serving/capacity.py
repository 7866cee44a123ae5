"""Capacity planning for serving: replicas, time to first token (TTFT), inter-token latency (ITL) and cost at a load.

`engine_step.py` computes the time of an engine's steps; queueing theory converts it into latencies at a load. Two deployments are
compared: `aggregated` engines mix prompt chunks into their decode steps (chunked prefill); `disaggregated` engines either
prefill or decode, and transfer KV caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from strata.planner.catalogue.shape import Shape
from strata.planner.serving.engine_step import Load, Precision, decode, describe, most, prefill
from strata.planner.serving.queueing import erlang_c, settle, smallest
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Fabric, Gpu

Link = Literal["fabric", "nvlink", "pcie"]
Kind = Literal["aggregated", "disaggregated"]

# HTTP, tokenizer, queues between processes, the first chunk of the stream. On an H200, the TTFT of 512 tokens on a 1.2B model is
# 15 ms (bare vLLM), of which prefill takes 3 ms.
REQUEST_S = 12e-3
# Fixed cost of a KV transfer: metadata, notification, one more hop. With both engines on one H200, TTFT is 2.1 ms higher than
# with one engine; most of it is the decode step before the first token.
HANDOFF_S = 1e-3
TRANSFER_SHARE = 0.8  # of the link's rate, for reads of KV blocks of about 100 KB
MOST_REPLICAS = 100_000


@dataclass(frozen=True)
class Slo:
    """Service level objective: the 99th percentile of TTFT, and the mean ITL of a stream."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True)
class Pool:
    """Replicas with their latencies and cost. `itl_worst_s` is the ITL of a stream during another request's prefill."""

    kind: Kind
    prefill_replicas: int  # 0 when aggregated
    decode_replicas: int
    gpus: int
    batch: float  # sequences that decode together in one engine
    ttft_p50_s: float
    ttft_p99_s: float
    itl_s: float
    itl_worst_s: float
    dollars_per_million_tokens: float  # prompt and output together
    dollars_per_million_output_tokens: float  # the whole cost divided by output tokens


@dataclass(frozen=True)
class ServingPlan:
    """`disaggregated` is None where it cannot meet the SLO. `remote_from` is the prompt length from which remote prefill pays
    off."""

    load: Load
    weights_bytes: float  # of one GPU
    kv_bytes_per_token: float  # of one GPU
    batch_that_fits: int
    tokens_per_s: float  # output of one replica, at most
    prefill_s: float
    transfer_s: float
    aggregated: Pool
    disaggregated: Pool | None
    remote_from: int | None
    worksheet: Worksheet


@dataclass(frozen=True)
class Point:
    kind: Kind
    requests_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_s: float


def plan_serving(
    shape: Shape,
    gpu: Gpu,
    fabric: Fabric,
    load: Load,
    slo: Slo,
    tensor: int = 1,
    precision: Precision = "bf16",
    *,
    worksheet: Worksheet,
    kv_precision: Precision = "bf16",
    max_sequences: int = 1024,
    link: Link = "fabric",
) -> ServingPlan:
    """Plan the fewest replicas that meet the SLO. All figures are lines of a part of `worksheet`."""
    _check_load(shape, load)
    top = worksheet.part("serving")
    describe(shape, gpu, top, tensor, precision, kv_precision, max_sequences)
    top.given("output", load.output, "", "output tokens of a request")
    top.given("variation", load.variation, "", "of prompt lengths: standard deviation over mean")
    top.given("request_s", REQUEST_S, "s", "HTTP, tokenizer and the stream's first chunk")
    top.given("dollars_per_gpu_hour", gpu.dollars_per_hour, "$")
    prefill(load.prompt, load.cached, top)
    batch, tokens_per_s = most(load, top)
    top.given("batch_that_fits", batch, "", "by memory, or max_sequences")
    transfer(gpu, fabric, link, top)
    _check_slo(load, slo, top)
    aggregated = _size_aggregated(load, slo, top)
    disaggregated = _size_disaggregated(load, slo, top)
    return ServingPlan(
        load=load,
        weights_bytes=top["weights_bytes"],
        kv_bytes_per_token=top["kv_bytes_per_token"],
        batch_that_fits=batch,
        tokens_per_s=tokens_per_s,
        prefill_s=top["prefill_s"],
        transfer_s=top["transfer_s"],
        aggregated=aggregated,
        disaggregated=disaggregated,
        remote_from=_remote_from(shape, load, disaggregated, top) if disaggregated else None,
        worksheet=top,
    )


def transfer(gpu: Gpu, fabric: Fabric, link: Link, worksheet: Worksheet) -> float:
    """Seconds of a prompt's KV transfer between engines, where every GPU sends its own shard."""
    rates: dict[Link, float] = {
        "fabric": min(fabric.nic * fabric.nics / gpu.domain, gpu.pcie),
        "nvlink": gpu.link,
        "pcie": gpu.pcie,
    }
    worksheet.given(
        "transfer_rate", rates[link] * TRANSFER_SHARE, "B/s", f"of one GPU over {link}, {TRANSFER_SHARE:.0%} of its rate"
    )
    worksheet.given("handoff_s", HANDOFF_S, "s", "metadata, notification, one more hop")
    return worksheet.work_out("transfer_s", "handoff_s + prompt * kv_bytes_per_token / transfer_rate", "s", "KV transfer")


def serve(kind: Kind, prefills: int, decodes: int, load: Load, part: Worksheet) -> Pool | None:
    """Latencies and cost of these replicas at this load, as lines of `part`. None if the load exceeds their capacity."""
    batch = _write_decode(kind, decodes, load, part)
    if batch is None or not _write_queue(kind, prefills or decodes, load, part):
        return None
    part.given("gpus", part["tensor"] * (prefills + decodes))
    part.work_out("dollars_per_million_requests", "gpus * dollars_per_gpu_hour / 3600 / requests_per_s * 1e6", "$")
    part.work_out("dollars_per_million_tokens", "dollars_per_million_requests / (prompt + output)", "$", "prompt and output")
    part.work_out(
        "dollars_per_million_output_tokens",
        "dollars_per_million_requests / output",
        "$",
        "the whole cost divided by output tokens",
    )
    return Pool(
        kind=kind,
        prefill_replicas=prefills,
        decode_replicas=decodes,
        gpus=int(part["gpus"]),
        batch=batch,
        ttft_p50_s=part["ttft_p50_s"],
        ttft_p99_s=part["ttft_p99_s"],
        itl_s=part["itl_s"],
        itl_worst_s=part["itl_worst_s"],
        dollars_per_million_tokens=part["dollars_per_million_tokens"],
        dollars_per_million_output_tokens=part["dollars_per_million_output_tokens"],
    )


def curve(plan: ServingPlan, rates: Sequence[float]) -> list[Point]:
    """TTFT and ITL of the plan's replicas at other request rates. Rates above their capacity are left out."""
    points = []
    for pool in (plan.aggregated, plan.disaggregated):
        for rate in rates:
            load = replace(plan.load, requests_per_s=rate)
            tried = pool and serve(
                pool.kind, pool.prefill_replicas, pool.decode_replicas, load, Worksheet("tried", plan.worksheet)
            )
            if tried:
                points.append(Point(tried.kind, rate, tried.ttft_p50_s, tried.ttft_p99_s, tried.itl_s))
    return points


def draw(plan: ServingPlan, path: Path) -> None:
    import matplotlib.pyplot as plt

    points = curve(plan, [plan.load.requests_per_s * number / 40 for number in range(1, 81)])
    figure, (ttft, itl) = plt.subplots(1, 2, figsize=(11, 4.5))
    for pool, color in ((plan.aggregated, "tab:blue"), (plan.disaggregated, "tab:orange")):
        if pool is None:
            continue
        own = [point for point in points if point.kind == pool.kind]
        x = [point.requests_per_s for point in own]
        ttft.plot(x, [1e3 * point.ttft_p50_s for point in own], color=color, label=f"{pool.kind}, {pool.gpus} GPUs: p50")
        ttft.plot(x, [1e3 * point.ttft_p99_s for point in own], "--", color=color, label="p99")
        itl.plot(x, [1e3 * point.itl_s for point in own], color=color, label=pool.kind)
    for axes, name in ((ttft, "TTFT"), (itl, "ITL")):
        axes.axvline(plan.load.requests_per_s, color="gray", lw=0.8)
        axes.set(xlabel="requests/s", ylabel=f"{name}, ms", yscale="log")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _check_load(shape: Shape, load: Load) -> None:
    if load.requests_per_s <= 0 or load.prompt < 1 or load.output < 1 or not 0 <= load.cached < 1:
        raise UserError(
            f"{load} is not a valid load",
            "use requests_per_s above 0, prompt and output of at least 1 token, and cached from 0 to below 1",
        )
    if load.prompt + load.output > shape.context:
        raise UserError(
            f"prompt + output = {load.prompt + load.output} tokens exceed the context of {shape.name}, {shape.context} tokens",
            "shorten them, or raise the model's context",
        )


def _check_slo(load: Load, slo: Slo, top: Worksheet) -> None:
    """Refuse an SLO that no number of replicas can meet."""
    fix = "raise tensor, use fp8 or a faster GPU, or allow more time"
    ttft = top["request_s"] + top["prefill_s"]
    if ttft >= slo.ttft_s:
        raise UserError(f"a prompt of {load.prompt} tokens takes {ttft:.3f} s without load: over ttft_s={slo.ttft_s}", fix)
    step = decode(1, load.context, Worksheet("alone", top))
    if step >= slo.itl_s:
        raise UserError(f"a decode step takes {step:.4f} s with one sequence: over itl_s={slo.itl_s}", fix)


def _write_decode(kind: Kind, decodes: int, load: Load, part: Worksheet) -> float | None:
    """Write the steady-state batch of each decode engine and its ITL."""
    part.given("requests_per_s", load.requests_per_s)
    part.given("decode_replicas", decodes)
    formula = "requests_per_s / decode_replicas * prefill_work_s" if kind == "aggregated" else "0"
    share = part.work_out("prefill_share", formula, "", "share of a decode engine's time spent on prefill")
    if share >= 1:
        return None
    tokens = load.requests_per_s / decodes * load.output
    batch = settle(
        lambda tried: tokens * decode(tried, load.context, Worksheet("tried", part)) / (1 - share), part["batch_that_fits"]
    )
    if batch is None:
        return None
    part.given("running", batch, "", "sequences per engine by Little's law: requests/s x output x ITL, where ITL depends on them")
    decode(batch, load.context, part)
    part.work_out("itl_s", "step_s / (1 - prefill_share)", "s", "step time, with the share of prefill")
    part.work_out(
        "itl_worst_s", "step_s + prefill_work_s / chunks" if kind == "aggregated" else "step_s", "s", "during a prefill"
    )
    return batch


def _write_queue(kind: Kind, engines: int, load: Load, part: Worksheet) -> bool:
    """Write the queue wait for a prefill engine and the TTFT. False past saturation. Reads the lines of `_write_decode`."""
    part.given("queue_engines", engines, "", "engines that prefill")
    if kind == "aggregated":
        part.work_out("service_s", "prefill_work_s + new_tokens / chunk * step_s", "s", "of a prompt, with decodes in its chunks")
        joined = "request_s + prefill_s + 1.5 * step_s * min(1, running)"
        why = "prefill, half a step until it can join the batch, and one decode step"
    else:
        part.work_out("service_s", "prefill_s", "s", "of a prompt")
        joined, why = "request_s + prefill_s + transfer_s + step_s", "prefill, KV transfer and the first decode step"
    offered = part.work_out("offered", "requests_per_s * service_s", "", "offered load: mean number of engines busy with prefill")
    if offered >= engines:
        return False
    part.given("waits", max(erlang_c(engines, offered), 1e-12), "", "probability that a prompt waits: Erlang's C")
    formula = "service_s / (queue_engines - offered) * (1 + variation ** 2) / 2"
    part.work_out("waiter_s", formula, "s", "mean wait of prompts that wait (Allen-Cunneen; with one engine Pollaczek-Khinchine)")
    part.work_out("mean_wait_s", "waits * waiter_s", "s")
    part.work_out("first_s", joined, "s", f"TTFT without a queue: {why}")
    for percent, beyond in ((50, 0.5), (99, 0.01)):
        formula = f"first_s + max(0, waiter_s * log(waits / {beyond}))"
        part.work_out(f"ttft_p{percent}_s", formula, "s", "of a prompt of mean length; exponential waits")
    return True


def _size_aggregated(load: Load, slo: Slo, top: Worksheet) -> Pool:
    def enough(replicas: int) -> bool:
        pool = serve("aggregated", 0, replicas, load, Worksheet("tried", top))
        return pool is not None and pool.ttft_p99_s <= slo.ttft_s and pool.itl_s <= slo.itl_s

    replicas = smallest(enough, MOST_REPLICAS)
    pool = serve("aggregated", 0, replicas, load, top.part("aggregated")) if replicas else None
    if pool is None:
        raise UserError(f"{MOST_REPLICAS} replicas are not enough for {load.requests_per_s} requests/s", "loosen the SLO")
    return pool


def _size_disaggregated(load: Load, slo: Slo, top: Worksheet) -> Pool | None:
    """Find the fewest decode replicas that meet the ITL, then the fewest prefill replicas that meet the TTFT with them."""

    def meets_itl(decodes: int) -> bool:
        tried = Worksheet("tried", top)
        return _write_decode("disaggregated", decodes, load, tried) is not None and tried["itl_s"] <= slo.itl_s

    decodes = smallest(meets_itl, MOST_REPLICAS)
    if decodes is None:
        return None

    def meets_ttft(prefills: int) -> bool:
        pool = serve("disaggregated", prefills, decodes, load, Worksheet("tried", top))
        return pool is not None and pool.ttft_p99_s <= slo.ttft_s

    prefills = smallest(meets_ttft, MOST_REPLICAS)
    if prefills is None:
        return None
    part = top.part("disaggregated")
    pool = serve("disaggregated", prefills, decodes, load, part)
    part.given("prefill_replicas", prefills)
    part.work_out("prefills_per_decode", "prefill_replicas / decode_replicas", "", "the ratio to deploy")
    return pool


def _remote_from(shape: Shape, load: Load, pool: Pool, top: Worksheet) -> int | None:
    """Prompt length from which remote prefill pays off; None if it never does.

    A local prefill delays every sequence that runs on the decode engine. A remote prefill delays its own request: by the queue
    for a prefill engine, by reading the weights for one prompt, by the KV transfer and by the first decode step. Remote prefill
    pays off where the delay of the running sequences is the longer one:

        prefill_work_s(prompt) > queue wait + prefill_s(prompt) - prefill_work_s(prompt) + transfer_s(prompt) + step_s
    """
    apart = next(part for part in top.parts if part.title == "disaggregated")

    def gain(prompt: int, part: Worksheet) -> float:
        prefill(prompt, load.cached, part)
        part.given("sometimes", min(1.0, pool.batch), "", "share of the time in which sequences run that a prefill could delay")
        part.given("queue_wait_s", apart["mean_wait_s"], "s", "for a prefill engine")
        part.given("first_step_s", apart["step_s"], "s", "of the decode engine")
        held_up = part.work_out(
            "held_up_s", "sometimes * prefill_work_s", "s", "delay of each running sequence by a local prefill"
        )
        transferred = "handoff_s + prompt * kv_bytes_per_token / transfer_rate"
        formula = f"queue_wait_s + prefill_s - prefill_work_s + {transferred} + first_step_s"
        return held_up - part.work_out("delayed_s", formula, "s", "delay of the TTFT by a remote prefill")

    prompt = smallest(lambda tried: gain(tried, Worksheet("tried", top)) > 0, shape.context)
    if prompt is not None:
        gain(prompt, top.part("remote prefill pays off from this prompt length: held_up_s > delayed_s"))
    return prompt
