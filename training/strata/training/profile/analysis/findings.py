"""Findings: causes that lengthen a step, each with the seconds that mending it would save."""

import re
from collections import Counter
from collections.abc import Callable
from math import ceil
from statistics import median

from strata.platform.profile.finding import Finding, Found, ms, worth
from strata.training.profile.analysis.expected import Machine
from strata.training.profile.analysis.summary import RankSummary, Summary

# Medians over five steps of a busy machine differ by about 3% from run to run, by cause of a step less.
LEAST = 0.05  # of a step that a finding saves
# Ranks of a CPU machine share caches and memory: their medians differ by up to 8%.
UNEVEN = 0.12
OTHER_WORK = 0.30  # stages with an embedding or a head take longer for the same FLOPs
# Recording an operator takes about as long as dispatching it, so a profile shows too much of this.
MOST_DISPATCH = 0.20
# A step agrees on its gradient norm and on its end. Such a collective takes as long as waking a thread on a busy machine.
TINY = 4096  # bytes
AGREEMENTS = 4  # tiny collectives of one kind in a step that cannot be saved
ENOUGH = 4  # micro-batches per stage that make a pipeline's bubble small
TWO_MACHINES = 1.3  # by which a faster precision must be faster
NAME = re.compile(r"(\S+) (.+) (\d+) B")  # of a collective
NONE = f"Nothing stands out: no cause takes {LEAST:.0%} of a step that could be saved."


Rule = Callable[[Summary, Machine], "Found | None"]


def findings(summary: Summary, machine: Machine) -> list[Finding]:
    """All findings that save enough, the largest first."""
    step = summary.step
    return worth((each for rule in RULES if (each := rule(summary, machine))), step, LEAST)


def _slowest(summary: Summary, cause: str) -> tuple[RankSummary, float]:
    rank = max(summary.ranks, key=lambda each: each.seconds.get(cause, 0.0))
    return rank, rank.seconds.get(cause, 0.0)


def _share(seconds: float, summary: Summary) -> str:
    return f"{seconds / summary.step:.0%} of each step ({ms(seconds)} of {ms(summary.step)})"


def _on(rank: RankSummary, summary: Summary, cause: str) -> str:
    """Names the rank where the others spend less than half as long."""
    others = [each.seconds.get(cause, 0.0) for each in summary.ranks if each is not rank]
    if not others:
        return ""
    return f" on rank {rank.rank}" if max(others) < rank.seconds[cause] / 2 else " on every rank"


def _data(summary: Summary, machine: Machine) -> Found | None:
    rank, seconds = _slowest(summary, "data")
    text = f"Data loading blocks {_share(seconds, summary)}{_on(rank, summary, 'data') if seconds else ''}."
    return Found("data", seconds, text, "Move data.path and the cache folder to faster storage, or prepare shorter inputs.")


def _evaluation(summary: Summary, machine: Machine) -> Found | None:
    seconds, train = summary.rare("evaluation"), summary.recipe.train
    text = f"Evaluation takes {_share(seconds, summary)}, spread over train.eval_every={train.eval_every} steps."
    return Found("evaluation", seconds, text, f"Raise train.eval_every, or lower train.eval_sequences={train.eval_sequences}.")


def _checkpoint(summary: Summary, machine: Machine) -> Found | None:
    seconds, train = summary.rare("checkpoint"), summary.recipe.train
    text = f"Checkpoints block {_share(seconds, summary)}, spread over train.checkpoint_every={train.checkpoint_every} steps."
    upload = ", or set train.checkpoint_upload=async" if train.checkpoint_upload == "sync" else ""
    return Found("checkpoint", seconds, text, f"Raise train.checkpoint_every{upload}.")


def _garbage(summary: Summary, machine: Machine) -> Found | None:
    rank, seconds = _slowest(summary, "garbage collection")
    where = _on(rank, summary, "garbage collection") if seconds else ""
    text = f"Python's garbage collector stops {_share(seconds, summary)}{where}."
    return Found("garbage collection", seconds, text, "Call gc.freeze() after the first step, and collect less often.")


def _allocation(summary: Summary, machine: Machine) -> Found | None:
    _, seconds = _slowest(summary, "allocation")
    text = f"The GPU waits {_share(seconds, summary)} for memory from the driver (cudaMalloc, cudaFree)."
    return Found(
        "allocation", seconds, text, "Do not empty torch's cache in the loop; lower train.micro_batch if memory is short."
    )


def _host_reads(summary: Summary, machine: Machine) -> Found | None:
    _, seconds = _slowest(summary, "host reads")
    text = f"The host reads values of tensors (.item()) and waits for them: {_share(seconds, summary)}."
    return Found("host reads", seconds, text, "Leave the value on the device (torch.where), or read it every few steps.")


def _recomputation(summary: Summary, machine: Machine) -> Found | None:
    mode = summary.recipe.train.recompute
    if mode == "none":
        return None
    seconds = max(max(each.seconds.get("recomputation", 0.0), _repeated(each)) for each in summary.ranks)
    less = "train.recompute=selective" if mode == "full" else "train.recompute=none"
    text = f"Recomputing activations in the backward pass takes {_share(seconds, summary)}."
    return Found("recomputation", seconds, text, f"Set {less} if the activations fit: see the memory in the report.")


def _repeated(rank: RankSummary) -> float:
    """Seconds of a GPU's products that repeat the forward pass: a backward pass alone has two for each of the forward pass."""
    if not rank.trace.on_gpu:
        return 0.0
    products = [work for work in rank.works if work.kind == "matrix products"]
    forward = sum(work.flops for work in products if work.phase == "forward")
    backward = sum(work.flops for work in products if work.phase == "backward")
    seconds = sum(work.seconds for work in products if work.phase == "backward") / len(rank.steps)
    return max(0.0, backward - 2 * forward) / backward * seconds if backward else 0.0


def _scores(summary: Summary, machine: Machine) -> Found | None:
    """Attention that stores its scores. Fused attention computes the same products, and passes over no scores."""
    _, seconds = _slowest(summary, "scores")
    text = f"Attention stores its scores, [batch, heads, tokens, tokens], which takes {_share(seconds, summary)}."
    remedy = "Use fused attention: train.kernels=strata, or torch's scaled_dot_product_attention without a mask."
    return Found("unfused attention", seconds, text, remedy)


def _dispatch(summary: Summary, machine: Machine) -> Found | None:
    """Host time between the operators. It is a cause of its own only if all ranks have it."""
    seconds = median(each.seconds.get("dispatch", 0.0) for each in summary.ranks)
    if seconds < MOST_DISPATCH * summary.step:
        return None
    train, count = summary.recipe.train, summary.micro_batches
    text = f"Launching operators takes {_share(seconds, summary)}: they are small, {train.micro_batch} sequences at a time."
    if count > 1:
        return Found("dispatch", seconds * (1 - 1 / count), text, f"Raise train.micro_batch: a step has {count} micro-batches.")
    compiled = "" if train.compile else ", or set train.compile=true"
    return Found("dispatch", seconds / 2, text, f"Raise train.micro_batch with train.batch{compiled}.")


def _collectives(summary: Summary, machine: Machine) -> Found | None:
    reduction = min(each.seconds.get("gradient reduction", 0.0) for each in summary.ranks)
    transfers = _avoidable(summary)
    if not transfers:
        return None
    seconds = sum(transfers.values()) + reduction
    largest = max(transfers, key=lambda name: transfers[name])
    text = f"Collectives that no computation hides take {_share(seconds, summary)}, most of it {_spoken(largest)}."
    if _bytes(largest) <= TINY:
        remedy = "Exchange small values together, once a step."
    else:
        remedy = "Reduce gradients in buckets during the backward pass, or raise train.batch to exchange them less often."
    return Found("collectives", seconds, text, remedy)


def _avoidable(summary: Summary) -> dict[str, float]:
    """Exposed seconds of collectives by name, without the few by which every step agrees on something."""
    counts: Counter[str] = Counter()
    for rank in summary.ranks:
        here = Counter(each.name for step in rank.steps for each in step.exchanges)
        counts |= Counter({name: ceil(count / len(rank.steps)) for name, count in here.items()})
    return {name: seconds for name, seconds in summary.transfers.items() if counts[name] > AGREEMENTS or _bytes(name) > TINY}


def _bytes(name: str) -> int:
    match = NAME.fullmatch(name)
    return int(match[3]) if match else 0


def _spoken(name: str) -> str:
    match = NAME.fullmatch(name)
    if match is None:
        return name
    size = f"{int(match[3]) / 2**20:,.3g} MiB" if int(match[3]) > TINY else f"{match[3]} bytes"
    return f"{match[1]} of {size} between ranks {match[2]}"


def _expected_computing(summary: Summary) -> dict[int, float]:
    """Seconds of each rank by its FLOPs, at the median rate of all ranks."""
    rate = median(each.computing / each.flops for each in summary.ranks if each.flops) if summary.ranks[0].flops else 0.0
    return {each.rank: each.flops * rate for each in summary.ranks}


def _slow_rank(summary: Summary, machine: Machine) -> Found | None:
    """A rank that takes longer for its FLOPs than its peers. All of them wait for it."""
    if len(summary.ranks) < 2:
        return None
    slow = max(summary.ranks, key=lambda each: _excess(each, summary))
    excess = _excess(slow, summary)
    if excess < (OTHER_WORK if summary.stages > 1 else UNEVEN) * slow.computing:
        return None
    times = slow.computing / (slow.computing - excess)
    text = f"Rank {slow.rank} takes {times:.2f} times as long as its peers for the same work: {_share(excess, summary)}."
    return Found("slow rank", excess, text, f"Check the machine of rank {slow.rank}: clocks, temperature, other processes.")


def _excess(rank: RankSummary, summary: Summary) -> float:
    others = [each for each in summary.ranks if each is not rank]
    if not rank.flops or not all(each.flops for each in others):
        return 0.0
    return rank.computing - rank.flops * median(each.computing / each.flops for each in others)


def _uneven_stage(summary: Summary, machine: Machine) -> Found | None:
    """A stage with more work than the others, by its FLOPs."""
    if summary.stages < 2:
        return None
    expected = _expected_computing(summary)
    by_stage: dict[int, float] = {}
    for each in summary.ranks:
        by_stage[each.stage] = max(by_stage.get(each.stage, 0.0), expected[each.rank])
    stage, most = max(by_stage.items(), key=lambda each: each[1])
    mean = sum(by_stage.values()) / len(by_stage)
    if most - mean < UNEVEN * mean:
        return None
    seconds = (most - mean) * (1 + (summary.stages - 1) / summary.micro_batches)
    text = f"Stage {stage} of the pipeline has {most / mean:.2f} times the mean work: {_share(seconds, summary)}."
    return Found("uneven stage", seconds, text, "Move layers from it to the other stages.")


def _bubble(summary: Summary, machine: Machine) -> Found | None:
    stages, count = summary.stages, summary.micro_batches
    if stages < 2 or count >= ENOUGH * stages:
        return None
    text = (
        f"The pipeline idles {_share(summary.bubble, summary)} while it fills and drains: {count} micro-batches, {stages} stages."
    )
    saved = summary.bubble * (1 - count / (ENOUGH * stages))
    return Found("pipeline bubble", saved, text, f"Raise train.batch or lower train.micro_batch: {ENOUGH * stages} hide it.")


def _threads(summary: Summary, machine: Machine) -> Found | None:
    rank = min(summary.ranks, key=lambda each: each.trace.facts["threads"])
    threads, wanted = rank.trace.facts["threads"], summary.recipe.parallel.cpus_per_worker
    if rank.trace.on_gpu or threads >= wanted:
        return None
    parallel = sum(rank.seconds.get(cause, 0.0) for cause in ("products", "attention", "scores", "loss", "other work"))
    seconds = parallel * (1 - threads / wanted)
    text = f"Rank {rank.rank} computes on {threads} of its {wanted} processors, which costs up to {_share(seconds, summary)}."
    return Found("threads", seconds, text, "Remove torch.set_num_threads and OMP_NUM_THREADS, or lower parallel.cpus_per_worker.")


def _precision(summary: Summary, machine: Machine) -> Found | None:
    """Products in a precision that this device has a faster alternative to."""
    if machine.faster is None or machine.faster.times < TWO_MACHINES:
        return None
    _, products = _slowest(summary, "products")
    text = f"Matrix products in {machine.precision} take {_share(products, summary)}."
    remedy = f"Set {machine.faster.setting}: this device multiplies {machine.faster.times:.1f} times as fast with it."
    return Found("precision", products * (1 - 1 / machine.faster.times), text, remedy)


def _against_plan(summary: Summary, machine: Machine) -> Found | None:
    """The class of work that exceeds its plan the most."""
    over = {name: measured - planned for name, (planned, measured) in machine.planned.items() if measured > planned * 1.3}
    if not over:
        return None
    name = max(over, key=lambda each: over[each])
    planned, measured = machine.planned[name]
    text = f"{name.capitalize()} takes {ms(measured)} of each step, and 'strata plan' expects {ms(planned)}."
    return Found(f"plan: {name}", over[name], text, "See its kernels below, with the rates they reach.")


RULES: tuple[Rule, ...] = (
    _data,
    _evaluation,
    _checkpoint,
    _garbage,
    _allocation,
    _host_reads,
    _recomputation,
    _scores,
    _dispatch,
    _collectives,
    _slow_rank,
    _uneven_stage,
    _bubble,
    _threads,
    _precision,
    _against_plan,
)
