"""Compares an exported model with transformers: greedy tokens, one by one with the KV cache, and the logits behind them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from strata.training.deployment.runners import Runner
from strata.training.deployment.step import CacheShape

ROUNDINGS = 8  # of the largest logit, within which two logits are a tie: about the difference between two orders of summation


@dataclass(frozen=True)
class Disagreement:
    """A token that transformers chose, and the other that the export chose. `gap` is that of transformers' two logits."""

    prompt: int
    position: int
    expected: int
    found: int
    gap: float
    tie: bool

    def __str__(self) -> str:
        chosen = f"transformers chose {self.expected}, the export {self.found}"
        kind = "equal logits" if self.gap == 0 else f"logits {self.gap:.2g} apart"
        return f"prompt {self.prompt}, token {self.position}: {chosen} ({kind}{', a tie' if self.tie else ''})"


@dataclass
class Comparison:
    prompts: int = 0
    tokens: int = 0
    equal: int = 0
    largest_difference: float = 0.0  # of a logit
    seconds: float = 0.0  # of the export
    reference_seconds: float = 0.0
    disagreements: list[Disagreement] = field(default_factory=list)

    @property
    def ties(self) -> list[Disagreement]:
        return [each for each in self.disagreements if each.tie]

    @property
    def differences(self) -> list[Disagreement]:
        return [each for each in self.disagreements if not each.tie]


def compare(
    model: Any, run: Runner, shape: CacheShape, prompts: Sequence[Sequence[int]], tokens: int, advance: Callable[[], None]
) -> Comparison:
    """Generates `tokens` tokens for each prompt with both. The export continues with transformers' token after a tie, so that
    the tokens behind it are compared as well. Up to there this is its own greedy continuation."""
    result = Comparison()
    for number, prompt in enumerate(prompts):
        begin = time.perf_counter()
        expected, reference = _generate(model, prompt, tokens)
        middle = time.perf_counter()
        found = _follow(run, shape, prompt, expected, str(model.device))
        result.seconds += time.perf_counter() - middle
        result.reference_seconds += middle - begin
        _count(result, number, expected, reference, found, torch.finfo(shape.dtype).eps)
        advance()
    return result


def _generate(model: Any, prompt: Sequence[int], tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens of transformers' `generate`, and the logits [tokens, vocabulary] before any processing."""
    ids = torch.tensor([list(prompt)], device=model.device)
    plain = GenerationConfig(do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0)
    own, model.generation_config = model.generation_config, plain  # it may end early, or penalize repetitions
    try:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, use_cache=True
        )
    finally:
        model.generation_config = own
    chosen: list[int] = out.sequences[0, len(prompt) :].tolist()
    return chosen, torch.cat(out.logits).float().cpu()


def _follow(run: Runner, shape: CacheShape, prompt: Sequence[int], expected: Sequence[int], device: str) -> Tensor:
    """Logits [tokens, vocabulary] of the export: the prompt without a past, then one token at a time."""
    past = shape.past(1, 0, device)
    logits = []
    new = list(prompt)
    for position, token in enumerate(expected):
        ids = torch.tensor([new], device=device)
        mask = torch.ones(1, len(prompt) + position, dtype=torch.long, device=device)
        step, past = run(ids, mask, past)
        logits.append(step[0, -1])
        new = [token]
    return torch.stack(logits).float().cpu()


def _count(result: Comparison, number: int, expected: Sequence[int], reference: Tensor, found: Tensor, rounding: float) -> None:
    result.prompts += 1
    result.tokens += len(expected)
    difference = (reference - found).abs().nan_to_num(nan=float("inf")).masked_fill(reference == found, 0)
    result.largest_difference = max(result.largest_difference, float(difference.max()))
    for position, token in enumerate(expected):
        other = int(found[position].argmax())
        if other == token:
            result.equal += 1
            continue
        gap = float(reference[position, token] - reference[position, other])
        tie = tied(gap, float(reference[position].abs().max()), rounding)
        result.disagreements.append(Disagreement(number, position, token, other, gap, tie))


def tied(gap: float, largest: float, rounding: float) -> bool:
    """True for two logits that are equal, or closer than the rounding of the numeric type. False for NaN."""
    return gap <= ROUNDINGS * rounding * largest
