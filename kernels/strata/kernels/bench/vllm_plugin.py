"""Benchmark of vLLM with Strata's kernels against stock vLLM: equal greedy tokens, and tokens per second.

    python -m strata.kernels.bench.vllm_plugin --json plugin.json

All engines run on one GPU for the whole benchmark and are measured in alternation, so that clocks and temperature affect all of
them equally. The model has the shape of the h200 recipe and random weights, whose logits lie close together: in bf16, a different
summation order often selects a different token, after which the answers diverge. A divergence is therefore judged by the
difference of the two tokens' log-probabilities in vLLM's own answer. As a baseline, vLLM with one prompt at a time is compared
with itself in the same way.
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
# Accepted difference of log-probabilities where answers diverge. Logits of this model are around 4, where bf16 has a resolution
# of 1/32.
MAX_GAP = 0.25

PLAIN = "vllm"
OURS = "strata"
T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    prompts: int
    tokens_in: int
    tokens_out: int  # with `concurrency` the mean: lengths vary by half, so that answers end at different times
    concurrency: int | None = None

    def drawn(self, vocabulary: int, seed: int) -> tuple[list[list[int]], list[int]]:
        """Random prompts, and the lengths of their answers."""
        draw = random.Random(seed)
        prompts = [draw.choices(range(vocabulary), k=self.tokens_in) for _ in range(self.prompts)]
        vary = self.tokens_out // 2 if self.concurrency else 0
        return prompts, [self.tokens_out + draw.randint(-vary, vary) for _ in range(self.prompts)]

    def __str__(self) -> str:
        waiting = f", {self.concurrency} concurrent" if self.concurrency else ""
        return f"{self.prompts} x ({self.tokens_in} in, {self.tokens_out} out){waiting}"


WORKLOADS = {
    "served": Workload(512, 200, 128, concurrency=64),  # prompts arrive while others decode, as in a server
    "chat": Workload(256, 512, 128),
    "decode": Workload(64, 64, 512),
    "long": Workload(64, 8192, 256),  # a step reads 17 GB of cache: bound by the GPU, not the host
}


@dataclass(frozen=True)
class Divergence:
    """First position where an answer differs from vLLM's; the gap is None if the token is not among vLLM's top tokens."""

    prompt_length: int
    position: int
    gap: float | None

    @property
    def within_tolerance(self) -> bool:
        return self.gap is not None and self.gap <= MAX_GAP


def divergences(theirs: Sequence[Answer], others: Sequence[Answer], lengths: Sequence[int]) -> list[Divergence]:
    found = []
    for expected, answer, length in zip(theirs, others, lengths, strict=True):
        for position, (token, other) in enumerate(zip(expected.tokens, answer.tokens, strict=True)):
            if token != other:
                rates = expected.rated[position]
                found.append(Divergence(length, position, rates[token] - rates[other] if other in rates else None))
                break
    return found


def distances(theirs: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    """Differences of log-probabilities of the same token after the same prefix, up to and including a divergence."""
    found: list[float] = []
    for expected, answer in zip(theirs, others, strict=True):
        for position, rates in enumerate(expected.rated):
            both = rates.keys() & answer.rated[position].keys()
            found += [abs(rates[token] - answer.rated[position][token]) for token in both]
            if expected.tokens[position] != answer.tokens[position]:
                break
    return found


def bench(contenders: dict[str, Sequence[str]], rounds: int, limit_s: float, path: Path | None) -> bool:
    """Returns whether no engine failed and every answer equals vLLM's or diverges only within the tolerance."""
    model = recipe_file.load("h200", [f"model.context={CONTEXT}"]).model
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-vllm-")))
        write_model(folder / "model", model)
        engines = {name: start(name, folder, parts, {"max_model_len": CONTEXT}) for name, parts in contenders.items()}
        for engine in engines.values():
            stack.callback(engine.close)
        result: dict[str, Any] = benchmark_record.header("vllm-plugin")
        result["contenders"] = {name: {"parts": list(parts)} for name, parts in contenders.items()}
        for name, seconds in _each(engines, list(engines), Engine.wait_until_up, result):
            result["contenders"][name]["up_after_s"] = seconds
            print(f"{name}: started in {seconds:.0f} s", flush=True)
            for line in engines[name].log_lines("backend", "raph captur", "Strata"):
                print(f"  {line[:220]}", flush=True)
        right = _compare_answers(engines, model.vocab, result)
        _compare_speed(engines, model.vocab, rounds, time.monotonic() + limit_s, result)
        for name, engine in engines.items():
            late = [line for line in engine.log_lines("JIT compilation") if "activated" not in line]
            result["contenders"][name]["compiled_while_serving"] = late
            print("\n".join([f"{name}: {len(late)} kernels compiled while serving", *(f"  {line[:260]}" for line in late)]))
    if path is not None:
        write_atomic(path, json.dumps(result, indent=2))
    return right and len(engines) == len(contenders)


def _each(
    engines: dict[str, Engine], names: Iterable[str], call: Callable[[Engine], T], result: dict[str, Any]
) -> Iterator[tuple[str, T]]:
    """Calls `call` for each engine. A failed engine is dropped and the others continue; a failure of stock vLLM is raised."""
    for name in names:
        try:
            answer = call(engines[name])
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
    for concurrency, words in ((None, ""), (FEW, f", {FEW} at once")):  # prompts only, and prompts mixed with decodes
        further = [name for name in engines if name != PLAIN or concurrency]
        call = partial(Engine.answer, prompts=prompts, tokens=NEW_TOKENS, concurrency=concurrency)
        others |= {name + words: answers for name, answers in _each(engines, further, call, result)}
    result["answers"] = {}
    right = True
    for name, answers in others.items():
        found = divergences(theirs, answers, PROMPT_LENGTHS)
        apart = distances(theirs, answers)
        result["answers"][name] = {
            "equal": len(prompts) - len(found),
            "of": len(prompts),
            "parted": list(map(asdict, found)),
            "log_probabilities_apart": {"mean": statistics.mean(apart), "most": max(apart)},
        }
        right = right and all(divergence.within_tolerance for divergence in found)
        where = ", ".join(f"{one.prompt_length}+{one.position} (gap {one.gap})" for one in found) or "none"
        print(
            f"{name}: {len(prompts) - len(found)} of {len(prompts)} answers equal {PLAIN}'s; log-probabilities differ by "
            f"{statistics.mean(apart):.4f} on average, {max(apart):.4f} at most; diverged: {where}",
            flush=True,
        )
    return right


def _compare_speed(engines: dict[str, Engine], vocabulary: int, rounds: int, deadline: float, result: dict[str, Any]) -> None:
    speeds: dict[str, dict[str, list[float]]] = {workload: {name: [] for name in engines} for workload in WORKLOADS}
    for number in range(rounds + 1):  # round 0 is a warm-up
        if number > 1 and time.monotonic() > deadline:
            print(f"stopped after {number - 1} rounds: time limit reached")
            break
        order = list(engines) if number % 2 else list(reversed(engines))
        for name, workload in WORKLOADS.items():
            prompts, lengths = workload.drawn(vocabulary, seed=number)
            call = partial(Engine.seconds, prompts=prompts, tokens=lengths, concurrency=workload.concurrency)
            remaining = [contender for contender in order if contender in engines]
            for contender, seconds in _each(engines, remaining, call, result):
                if number:
                    speeds[name][contender].append(sum(lengths) / seconds)
    result["output_tokens_per_s"] = speeds
    result["ratio_to_vllm"] = {}
    for name, workload in WORKLOADS.items():
        print(f"\n{name}: {workload}: tokens/s, ratio and standard error")
        ratios = result["ratio_to_vllm"][name] = {}
        for contender, rates in ((contender, rates) for contender, rates in speeds[name].items() if rates):
            ratio, error = paired_ratio(rates, speeds[name][PLAIN])
            ratios[contender] = {"ratio": ratio, "standard_error": error}
            each = " ".join(f"{rate:.0f}" for rate in rates)
            spread = "" if error is None else f" ± {error:.3f}"
            print(f"  {contender:48} {statistics.median(rates):8.0f}  {ratio:.3f}{spread}  rounds: {each}", flush=True)


def paired_ratio(rates: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Geometric mean of the rounds' ratios, and its standard error (None for one round). A step of a small model is mostly
    Python, and rounds of one engine vary by a quarter with the speed of the host: a ratio within its error of 1 is no
    difference."""
    logs = [math.log(rate / other) for rate, other in zip(rates, others, strict=False)]  # a failed engine has fewer rounds
    ratio = math.exp(statistics.mean(logs))
    return ratio, ratio * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m strata.kernels.bench.vllm_plugin", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no further round starts")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PARTS",
        help=f"another engine, with these parts of {','.join(vllm_plugin.PARTS)}",
    )
    given = parser.parse_args()
    contenders: dict[str, Sequence[str]] = {PLAIN: (), OURS: vllm_plugin.SERVED}
    contenders |= {parts.replace(",", "+"): parts.split(",") for parts in given.also}
    try:
        right = bench(contenders, given.rounds, given.limit, given.json)
    except UserError as error:
        raise SystemExit(str(error)) from None
    if not right:
        raise SystemExit(f"Answers differ from {PLAIN}'s by more than the tolerance.")


if __name__ == "__main__":
    main()
