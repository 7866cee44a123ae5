"""Process of one contender: starts vLLM's offline engine, measures it at every level, writes the result and ends.

A level is measured twice in a round, with answers of one token and with whole answers. The difference is decoding alone: both
prefill the same prompts.
"""

import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.platform.files import write_atomic
from strata.serving.bench.quantized import model
from strata.serving.bench.quantized.contenders import Contender, named
from strata.serving.bench.quantized.model import Shape

if TYPE_CHECKING:
    from vllm import LLM

GPU_MEMORY = 0.6
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Load:
    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int  # after the first
    rounds: int
    eager: bool
    head: bool  # quantized, too

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.output_tokens + 1


@dataclass(frozen=True)
class Order:
    """Arguments of the process."""

    contender: str
    shape: Shape
    load: Load
    folder: str  # of the model, to be written
    result: str  # file to write

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> "Order":
        words = json.loads(text)
        load = words["load"] | {"concurrency": tuple(words["load"]["concurrency"])}
        return Order(**(words | {"shape": Shape(**words["shape"]), "load": Load(**load)}))


def main(order: Order) -> None:
    contender = named(order.contender)
    model.write(Path(order.folder), order.shape, contender.preset, order.load.head, order.load.context)
    began = time.perf_counter()
    from vllm import LLM

    llm = LLM(**arguments(order.folder, order.load, contender))
    ready_s = time.perf_counter() - began
    llm.collective_rpc("fill_with_random_numbers")
    require_finite(llm, order)
    rates: dict[int, list[float]] = {}
    for level in order.load.concurrency:
        seconds_of(llm, order, level, WARM_UP_TOKENS)
        rates[level] = [decode_rate(llm, order, level) for _ in range(order.load.rounds)]
    write_atomic(Path(order.result), json.dumps({"ready_s": ready_s, "rates": rates}))


def arguments(folder: str, load: Load, contender: Contender) -> dict[str, Any]:
    of_contender = contender.arguments
    compiled = of_contender.pop("compilation_config", {})
    if not load.eager:  # graphs of other sizes would lengthen the start, and no step would use them
        compiled["cudagraph_capture_sizes"] = sorted(load.concurrency)
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": load.context,
        "max_num_seqs": max(load.concurrency),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": GPU_MEMORY,
        "enforce_eager": load.eager,
        "worker_extension_cls": "strata.serving.bench.quantized.worker.RandomWeights",
        **of_contender,
        **({} if load.eager else {"compilation_config": compiled}),
    }


def require_finite(llm: "LLM", order: Order) -> None:
    """Numbers that overflow would be fast, and no model."""
    answers = _generate(llm, order, 1, WARM_UP_TOKENS, logprobs=0)
    for place in answers[0].outputs[0].logprobs:
        if not all(math.isfinite(each.logprob) for each in place.values()):
            raise ValueError(f"the random weights of {order.contender} give logits that are not finite")


def decode_rate(llm: "LLM", order: Order, level: int) -> float:
    first = seconds_of(llm, order, level, 1)
    whole = seconds_of(llm, order, level, 1 + order.load.output_tokens)
    return level * order.load.output_tokens / (whole - first)


def seconds_of(llm: "LLM", order: Order, level: int, tokens: int) -> float:
    began = time.perf_counter()
    answers = _generate(llm, order, level, tokens)
    took = time.perf_counter() - began
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [tokens] * level
    return took


def _generate(llm: "LLM", order: Order, level: int, tokens: int, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    draw = random.Random(level)
    prompts = [{"prompt_token_ids": draw.choices(range(order.shape.vocab), k=order.load.prompt_tokens)} for _ in range(level)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return llm.generate(prompts, sampling, use_tqdm=False)


if __name__ == "__main__":
    main(Order.of(sys.argv[1]))
