"""vLLM with our kernels beside vLLM as it comes: the same greedy tokens, and how many of them a second.

    python -m strata.kernels.bench.vllm_plugin --json plugin.json

All engines are up at the same time, on one GPU, and are driven in turn, so that its clocks and temperature meet all alike. The
model has the shape of the h200 recipe and random weights, with which logits lie close together: in bf16 sums in another order
often choose another token, and all that follows differs. So a difference counts by how far apart vLLM itself saw the two tokens
where the answers part, and vLLM that has the prompts one by one instead of all at once is compared in the same way.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from strata.kernels import vllm_plugin
from strata.kernels.bench.vllm_engine import Answer, Engine, start, write_model
from strata.platform import benchmark_record, recipe_file
from strata.platform.errors import UserError
from strata.platform.files import write_atomic

CONTEXT = 16384
PROMPT_LENGTHS = (3, 5, 9, 16, 17, 31, 64, 100, 129, 256, 400, 513, 1000, 1024, 2047, 3000)
NEW_TOKENS = 32
FEW = 4
# Where answers part, vLLM may rate the other token at most this much lower: logits of this model lie around 4, where bf16 steps
# by 1/32.
GAP = 0.25

PLAIN = "vllm"
OURS = "strata"
T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    prompts: int
    tokens_in: int
    tokens_out: int  # with `at_once` in the mean: half as many to half as many again, so that answers end one by one
    at_once: int | None = None

    def drawn(self, vocabulary: int, seed: int) -> tuple[list[list[int]], list[int]]:
        """Prompts, and how long their answers shall be."""
        draw = random.Random(seed)
        prompts = [draw.choices(range(vocabulary), k=self.tokens_in) for _ in range(self.prompts)]
        vary = self.tokens_out // 2 if self.at_once else 0
        return prompts, [self.tokens_out + draw.randint(-vary, vary) for _ in range(self.prompts)]

    def __str__(self) -> str:
        waiting = f", {self.at_once} at once" if self.at_once else ""
        return f"{self.prompts} x ({self.tokens_in} in, {self.tokens_out} out){waiting}"


WORKLOADS = {
    "served": Workload(512, 200, 128, at_once=64),  # a prompt comes in beside streams: what a server's steps are like
    "chat": Workload(256, 512, 128),
    "decode": Workload(64, 64, 512),
    "long": Workload(64, 8192, 256),  # a step reads 17 GB of cache: here the GPU, not the host, sets the pace
}


@dataclass(frozen=True)
class Parting:
    """Where an answer is no longer vLLM's; the gap is None if the other token was not among vLLM's first."""

    prompt_length: int
    position: int
    gap: float | None

    @property
    def excused(self) -> bool:
        return self.gap is not None and self.gap <= GAP


def partings(theirs: Sequence[Answer], others: Sequence[Answer], lengths: Sequence[int]) -> list[Parting]:
    found = []
    for expected, answer, length in zip(theirs, others, lengths, strict=True):
        for position, (token, other) in enumerate(zip(expected.tokens, answer.tokens, strict=True)):
            if token != other:
                rates = expected.rated[position]
                found.append(Parting(length, position, rates[token] - rates[other] if other in rates else None))
                break
    return found


def distances(theirs: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    """Between log-probabilities of the same token after the same tokens: up to where answers part, and there."""
    found: list[float] = []
    for expected, answer in zip(theirs, others, strict=True):
        for position, rates in enumerate(expected.rated):
            both = rates.keys() & answer.rated[position].keys()
            found += [abs(rates[token] - answer.rated[position][token]) for token in both]
            if expected.tokens[position] != answer.tokens[position]:
                break
    return found


def bench(contenders: dict[str, Sequence[str]], rounds: int, limit_s: float, path: Path | None) -> bool:
    """Whether every answer of ours is vLLM's, or parts from it where vLLM was undecided, and nobody failed."""
    model = recipe_file.load("h200", [f"model.context={CONTEXT}"]).model
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-vllm-")))
        write_model(folder / "model", model)
        engines = {name: start(name, folder, parts, {"max_model_len": CONTEXT}) for name, parts in contenders.items()}
        for engine in engines.values():
            stack.callback(engine.close)
        result: dict[str, Any] = benchmark_record.header()
        result["contenders"] = {name: {"parts": list(parts)} for name, parts in contenders.items()}
        for name, seconds in _each(engines, list(engines), Engine.wait_until_up, result):
            result["contenders"][name]["up_after_s"] = seconds
            print(f"{name}: up after {seconds:.0f} s", flush=True)
            for line in engines[name].said("backend", "raph captur", "Strata"):
                print(f"  {line[:220]}", flush=True)
        right = _compare_answers(engines, model.vocab, result)
        _compare_speed(engines, model.vocab, rounds, time.monotonic() + limit_s, result)
        for name, engine in engines.items():
            late = [line for line in engine.said("JIT compilation") if "activated" not in line]
            result["contenders"][name]["compiled_while_serving"] = late
            print("\n".join([f"{name}: {len(late)} kernels compiled while it served", *(f"  {line[:260]}" for line in late)]))
    if path is not None:
        write_atomic(path, json.dumps(result, indent=2))
    return right and len(engines) == len(contenders)


def _each(
    engines: dict[str, Engine], names: Iterable[str], ask: Callable[[Engine], T], result: dict[str, Any]
) -> Iterator[tuple[str, T]]:
    """Who fails is left out from there on, and the others go on; without vLLM itself there is nothing to compare with."""
    for name in names:
        try:
            answer = ask(engines[name])
        except UserError as error:
            if name == PLAIN:
                raise
            print(error, flush=True)
            result["contenders"][name]["failed"] = True
            engines.pop(name).close()
        else:
            yield name, answer


def _compare_answers(engines: dict[str, Engine], vocabulary: int, result: dict[str, Any]) -> bool:
    draw = random.Random(0)
    prompts = [draw.choices(range(vocabulary), k=length) for length in PROMPT_LENGTHS]
    theirs = engines[PLAIN].answer(prompts, NEW_TOKENS)
    others = {f"{PLAIN}, one by one": [engines[PLAIN].answer([prompt], NEW_TOKENS)[0] for prompt in prompts]}
    for at_once, words in ((None, ""), (FEW, f", {FEW} at once")):  # prompts alone in a step, and prompts among streams
        further = [name for name in engines if name != PLAIN or at_once]
        ask = partial(Engine.answer, prompts=prompts, tokens=NEW_TOKENS, at_once=at_once)
        others |= {name + words: answers for name, answers in _each(engines, further, ask, result)}
    result["answers"] = {}
    right = True
    for name, answers in others.items():
        found = partings(theirs, answers, PROMPT_LENGTHS)
        apart = distances(theirs, answers)
        result["answers"][name] = {
            "equal": len(prompts) - len(found),
            "of": len(prompts),
            "parted": list(map(asdict, found)),
            "log_probabilities_apart": {"mean": statistics.mean(apart), "most": max(apart)},
        }
        right = right and all(parting.excused for parting in found)
        where = ", ".join(f"{one.prompt_length}+{one.position} (gap {one.gap})" for one in found) or "none"
        print(
            f"{name}: {len(prompts) - len(found)} of {len(prompts)} answers are {PLAIN}'s; log-probabilities apart by "
            f"{statistics.mean(apart):.4f} in the mean, {max(apart):.4f} at most; parted: {where}",
            flush=True,
        )
    return right


def _compare_speed(engines: dict[str, Engine], vocabulary: int, rounds: int, deadline: float, result: dict[str, Any]) -> None:
    speeds: dict[str, dict[str, list[float]]] = {workload: {name: [] for name in engines} for workload in WORKLOADS}
    for number in range(rounds + 1):  # the first warms up
        if number > 1 and time.monotonic() > deadline:
            print(f"stopped after {number - 1} rounds, for the time is up")
            break
        order = list(engines) if number % 2 else list(reversed(engines))
        for name, workload in WORKLOADS.items():
            prompts, lengths = workload.drawn(vocabulary, seed=number)
            ask = partial(Engine.seconds, prompts=prompts, tokens=lengths, at_once=workload.at_once)
            asked = [contender for contender in order if contender in engines]
            for contender, seconds in _each(engines, asked, ask, result):
                if number:
                    speeds[name][contender].append(sum(lengths) / seconds)
    result["output_tokens_per_s"] = speeds
    result["ratio_to_vllm"] = {}
    for name, workload in WORKLOADS.items():
        print(f"\n{name}: {workload}: tokens/s, ratio with its standard error")
        ratios = result["ratio_to_vllm"][name] = {}
        for contender, rates in ((contender, rates) for contender, rates in speeds[name].items() if rates):
            ratio, error = paired_ratio(rates, speeds[name][PLAIN])
            ratios[contender] = {"ratio": ratio, "standard_error": error}
            each = " ".join(f"{rate:.0f}" for rate in rates)
            spread = "" if error is None else f" ± {error:.3f}"
            print(f"  {contender:48} {statistics.median(rates):8.0f}  {ratio:.3f}{spread}  rounds: {each}", flush=True)


def paired_ratio(rates: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """The geometric mean of the rounds' ratios, and its standard error, which one round does not have. A step of a small model is
    mostly Python, and rounds of one engine differ by a quarter as the host is quick or slow: a ratio within that error of 1 is
    no difference."""
    logs = [math.log(rate / other) for rate, other in zip(rates, others, strict=False)]  # who failed has fewer
    ratio = math.exp(statistics.mean(logs))
    return ratio, ratio * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m strata.kernels.bench.vllm_plugin", description=__doc__)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of measuring after which no further round begins")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PARTS",
        help=f"another engine, with these of {','.join(vllm_plugin.PARTS)}",
    )
    given = parser.parse_args()
    contenders: dict[str, Sequence[str]] = {PLAIN: (), OURS: vllm_plugin.SERVED}
    contenders |= {parts.replace(",", "+"): parts.split(",") for parts in given.also}
    try:
        right = bench(contenders, given.rounds, given.limit, given.json)
    except UserError as error:
        raise SystemExit(str(error)) from None
    if not right:
        raise SystemExit(f"Answers differ from {PLAIN}'s where it was not undecided.")


if __name__ == "__main__":
    main()
