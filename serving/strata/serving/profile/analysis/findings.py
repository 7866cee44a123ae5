"""Findings of a profile of an endpoint: causes that cost its engines time, the largest first."""

from collections.abc import Callable

from strata.platform.profile.finding import Finding, Found, ms, worth
from strata.serving.profile.analysis.summary import EngineSummary, Summary

LEAST = 0.05  # of the time of the load
# Recording an operator takes about as long as dispatching it, so a profile shows too much of the host's time.
MOST_DISPATCH = 0.20
MOST_LOOP = 0.10
MOST_SAMPLING = 0.20
MOST_QUEUED = 0.20  # of a request's time
LONG_STEP = 4.0  # times a decode step: a prompt that holds up the streams beside it
UNEVEN = 0.12  # of the time, between engines of one pool
NONE = f"Nothing stands out: no cause takes {LEAST:.0%} of the engines' time."

Rule = Callable[[Summary], "Found | None"]


def findings(summary: Summary) -> list[Finding]:
    return worth((each for rule in RULES if (each := rule(summary))), summary.window, LEAST)


def _worst(summary: Summary, cause: str) -> tuple[EngineSummary, float]:
    engine = max(summary.engines, key=lambda each: each.seconds[cause])
    return engine, engine.seconds[cause]


def _share(seconds: float, summary: Summary) -> str:
    return f"{seconds / summary.window:.0%} of the time ({ms(seconds)} of {ms(summary.window)})"


def _load(summary: Summary) -> Found | None:
    """Time in which even the busiest engine has nothing to do."""
    seconds = min(each.seconds["waiting for requests"] for each in summary.engines)
    text = f"No request is in flight for {_share(seconds, summary)}."
    return Found("load", seconds, text, "Raise --concurrency or --rate: the engines can do more.")


def _front_end(summary: Summary) -> Found | None:
    seconds = min(each.seconds["front end"] for each in summary.engines)
    text = f"Requests are in flight and no engine has one for {_share(seconds, summary)}: gateways, tokenizers and clients work."
    return Found("front end", seconds, text, "Raise serve.gateways, or --concurrency, so that requests overlap.")


def _transfer(summary: Summary) -> Found | None:
    engine, seconds = _worst(summary, "KV transfer")
    text = f"Engine {engine.name} waits for KV blocks of another engine for {_share(seconds, summary)}."
    remedy = (
        "Raise serve.remote_prefill.min_tokens, so that short prompts are prefilled locally; 'strata bench transfer' measures it."
    )
    return Found("KV transfer", seconds, text, remedy)


def _collectives(summary: Summary) -> Found | None:
    engine, seconds = _worst(summary, "collectives")
    text = f"Collectives that no computation hides take {_share(seconds, summary)} of engine {engine.name}."
    return Found("collectives", seconds, text, "Lower tensor_parallel of its pool, and raise its replicas.")


def _scheduler(summary: Summary) -> Found | None:
    engine, seconds = _worst(summary, "scheduler")
    text = f"vLLM's scheduler takes {_share(seconds, summary)} of engine {engine.name}."
    return Found("scheduler", seconds, text, "Lower serve.max_sequences, and raise the replicas of its pool.")


def _dispatch(summary: Summary) -> Found | None:
    engine, seconds = _worst(summary, "dispatch")
    if seconds < MOST_DISPATCH * summary.window:
        return None
    text = f"Engine {engine.name} launches operators for {_share(seconds, summary)} without computing: they are small."
    return Found("dispatch", seconds, text, "Raise the concurrency, so that steps are larger; on a GPU set serve.eager=false.")


def _loop(summary: Summary) -> Found | None:
    engine, seconds = _worst(summary, "engine loop")
    if seconds < MOST_LOOP * summary.window:
        return None
    text = f"Engine {engine.name} reads requests and sends tokens between its steps for {_share(seconds, summary)}."
    return Found("engine loop", seconds, text, "Give its processes more processors, or raise the replicas of its pool.")


def _sampling(summary: Summary) -> Found | None:
    engine, seconds = _worst(summary, "sampling")
    if seconds < MOST_SAMPLING * summary.window:
        return None
    text = f"Sampling takes {_share(seconds, summary)} of engine {engine.name}."
    return Found("sampling", seconds, text, "Requests without logprobs, penalties and top-p sample faster.")


def _queue(summary: Summary) -> Found | None:
    engine = max(summary.engines, key=lambda each: each.queued)
    share, facts = engine.queued, engine.engine.facts
    if share < MOST_QUEUED:
        return None
    text = (
        f"Requests spend {share:.0%} of their time in the queue of engine {engine.name}, "
        f"which runs at most {facts['max_sequences']} sequences."
    )
    return Found("queue", share * summary.window, text, "Raise serve.max_sequences if the KV cache has space, or the replicas.")


def _preemption(summary: Summary) -> Found | None:
    """A preempted request is prefilled again."""
    engine = max(summary.engines, key=lambda each: each.preemptions)
    seconds = engine.preemptions * max(engine.mean("mixed step"), engine.mean("prefill step"))
    text = f"The KV cache of engine {engine.name} is full: it preempts {engine.preemptions} requests, {_share(seconds, summary)}."
    return Found("preemption", seconds, text, "Raise serve.kv_cache_gib or gpu_memory, or lower serve.max_sequences.")


def _prompts(summary: Summary) -> Found | None:
    """Prompts in the steps of running streams, where they take several times as long as a step without one."""
    engine = max(summary.engines, key=lambda each: each.mean("mixed step") * each.count("mixed step"))
    usual, long = engine.mean("decode step"), engine.mean("mixed step")
    if not usual or long < LONG_STEP * usual:
        return None
    seconds = (long - usual) * engine.count("mixed step")
    text = (
        f"Steps of engine {engine.name} take {ms(usual)}, and {ms(long)} with a prompt: streams wait {_share(seconds, summary)}."
    )
    return Found("prompts", seconds, text, "Set serve.prefill.replicas=1, or lower serve.decode.step_tokens.")


def _uneven(summary: Summary) -> Found | None:
    for role in ("decode", "prefill"):
        busy = {each.name: each.busy for each in summary.engines if each.role == role}
        if len(busy) < 2:
            continue
        name = max(busy, key=lambda each: busy[each])
        excess = busy[name] - sum(busy.values()) / len(busy)
        if excess >= UNEVEN * summary.window:
            text = f"Engine {name} works {_share(excess, summary)} longer than the mean of the {role} pool."
            return Found("uneven engines", excess, text, "See serve.routing: prompts with the same beginning go to one engine.")
    return None


RULES: tuple[Rule, ...] = (
    _load,
    _front_end,
    _transfer,
    _collectives,
    _scheduler,
    _dispatch,
    _loop,
    _sampling,
    _queue,
    _preemption,
    _prompts,
    _uneven,
)
