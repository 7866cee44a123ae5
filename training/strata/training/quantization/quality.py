"""Quality of a model before and after quantization: perplexity on held-out tokens and agreement of greedy tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from strata.training.quantization.rows import Tokens

PROMPTS = 32
PROMPT_TOKENS = 32
NEW_TOKENS = 32

Advance = Callable[[], None]


@dataclass(frozen=True)
class Greedy:
    """Continuations of prompts: `ids` is [prompts, prompt + new], and the prompt has `prompt` tokens."""

    ids: Tensor
    prompt: int

    @property
    def tokens(self) -> int:
        return self.ids.shape[0] * (self.ids.shape[1] - self.prompt)


@dataclass(frozen=True)
class Agreement:
    """Share of positions at which both models choose the same next token after the same tokens, and the share of prompts whose
    whole continuations are equal."""

    tokens: float
    prompts: float


@torch.no_grad()
def perplexity(model: Any, rows: Tokens, advance: Advance) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.from_numpy(row).to(model.device)
        logits = model(ids[None, :-1], use_cache=False).logits[0]
        total += cross_entropy(logits.float(), ids[1:], reduction="sum").double().cpu()
        advance()
    return math.exp(float(total) / (rows.shape[0] * (rows.shape[1] - 1)))


@torch.no_grad()
def greedy(model: Any, rows: Tokens) -> Greedy:
    """Continues the beginnings of held-out rows. All prompts have the same length, so that none is padded."""
    width = rows.shape[1] - 1
    prompt = min(PROMPT_TOKENS, max(1, width // 2))
    new = max(1, min(NEW_TOKENS, width - prompt))
    ids = torch.from_numpy(rows[:PROMPTS, :prompt]).to(model.device)
    plain = GenerationConfig(do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
    own, model.generation_config = model.generation_config, plain  # it may end early, or penalize repetitions
    try:
        return Greedy(model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True).cpu(), prompt)
    finally:
        model.generation_config = own


@torch.no_grad()
def agreement(model: Any, reference: Greedy, advance: Advance) -> Agreement:
    """Follows the reference's tokens, so that one different token does not make all tokens after it different."""
    rows = []
    for row in reference.ids:
        logits = model(row[None, :-1].to(model.device), use_cache=False).logits[0]
        rows.append(logits[reference.prompt - 1 :].argmax(-1).cpu() == row[reference.prompt :])
        advance()
    equal = torch.stack(rows)
    return Agreement(float(equal.float().mean()), float(equal.all(1).float().mean()))
