"""Tables of `strata bench quantized`, `strata bench offload` and `strata bench speculative`."""

from docgen.markdown import bold, milliseconds, table
from docgen.record import Run

LEAST_4_BIT, LEAST_4_BIT_OF_VLLM, UP_TO = 1.8, 1.0, 16  # at most this many at once
LEAST_FP8, FROM = 1.3, 64
OURS = ("w4a16-strata", "w4a16-served")  # contenders with Strata's kernel for 4-bit weights
MOST_OFFLOADED = 0.3
LEAST_DRAFTED = 1.3
STATES = {"cached": "in the KV cache", "tier": "evicted to host memory", "computed": "computed again"}


def quantized(run: Run) -> str:
    shape, load = run["shape"], run["load"]
    rows = [
        (f"`{name}`", str(level), f"{one['decode_tokens_per_s'][str(level)]:,.0f}", *_ratios(name, one, level))
        for name, one in run["contenders"].items()
        if not isinstance(one, str)
        for level in load["concurrency"]
    ]
    about = (
        f"Llama of {shape['layers']} layers of {shape['hidden']}, random weights; prompts of {load['prompt_tokens']} tokens, "
        f"{load['output_tokens']} tokens decoded; medians of {load['rounds']} rounds. The output layer is "
        f"{'quantized, too' if load['head'] else 'in 16 bits'}."
    )
    figures = table(("weights", "at once", "decode tokens/s", "÷ bf16", "÷ vLLM's kernel"), rows, numeric=1)
    aims = (
        f"Aims: 4-bit weights {LEAST_4_BIT} of bf16 and {LEAST_4_BIT_OF_VLLM} of vLLM's kernel up to {UP_TO} at once, FP8 "
        f"{LEAST_FP8} of bf16 from {FROM} on. A missed aim of Strata's kernel or of FP8 is **bold**."
    )
    return f"{about}\n\n{figures}\n\n{aims}"


def _ratios(name: str, one: Run, level: int) -> tuple[str, str]:
    to_bf16 = one["ratio_to_bf16"][str(level)]
    peer = one["ratio_to_best_of_vllm"]
    missed = (name in OURS and level <= UP_TO and to_bf16 < LEAST_4_BIT) or (
        name.startswith("fp8") and level >= FROM and to_bf16 < LEAST_FP8
    )
    of_vllm = peer[str(level)] if peer else None
    short = of_vllm is not None and level <= UP_TO and of_vllm < LEAST_4_BIT_OF_VLLM
    return bold(f"{to_bf16:.2f}", missed), bold(f"{of_vllm:.2f}", short) if of_vllm is not None else ""


def offload(run: Run) -> str:
    rows = [
        (
            STATES[state],
            milliseconds(one["ttft_s"]),
            bold(f"{one['ratio']:.2f}", state == "tier" and one["ratio"] > MOST_OFFLOADED),
        )
        for state, one in run["states"].items()
    ]
    figures = table(("KV blocks of the second turn", "TTFT", "÷ computed again"), rows, numeric=1)
    tokens = "the same in all states" if run["same_tokens"] and run["same_tokens_computed"] else "**not** the same in all states"
    load = run["load"]
    about = f"First turns of {load['input']:,} tokens, medians of {load['rounds']} conversations. Greedy tokens are {tokens}."
    return (
        f"{about}\n\n{figures}\n\nAim: evicted blocks at most {MOST_OFFLOADED} of computing them again. A missed aim is **bold**."
    )


def speculative(run: Run) -> str:
    load = run["load"]
    rows = [
        (
            f"`{method}`",
            *(word for level in load["concurrency"] for word in _speed(method, one, level)),
            "" if method == "none" else f"{one['accepted_share']:.0%}",
            "yes" if one["same_tokens"] else "**no**",
        )
        for method, one in run["methods"].items()
    ]
    speeds = (title for level in load["concurrency"] for title in (f"tokens/s, {level} at once", "÷ none"))
    figures = table(("drafts", *speeds, "accepted", "same tokens"), rows, numeric=1)
    about = (
        f"{load['prompts']} prompts of {load['characters']} characters, {load['tokens']} tokens an answer, up to {run['tokens']} "
        f"drafted tokens a step; medians of {load['rounds']} rounds."
    )
    aim = f"Aim of a draft model: {LEAST_DRAFTED} times the tokens/s without drafts. A missed aim is **bold**."
    return f"{about}\n\n{figures}\n\n{aim}"


def _speed(method: str, one: Run, level: int) -> tuple[str, str]:
    rate, ratio = one["tokens_per_s"][str(level)], one["ratio"][str(level)]
    return f"{rate:,.0f}", bold(f"{ratio:.2f}", method == "draft" and ratio < LEAST_DRAFTED)
