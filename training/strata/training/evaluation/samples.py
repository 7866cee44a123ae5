"""Sample generations during training: greedy continuations of fixed prompts, recorded in `samples.jsonl` of the run."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from tokenizers import Tokenizer
from torch import Tensor

from strata.platform.runs import Run
from strata.training.metrics import records

PAD_TO = 64  # tokens; few widths mean few compilations

# Tokens [batch, time] and the index of each row's last token -> the next token of each row.
NextTokens = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Prompts:
    """Prompts of `train.samples` with their token ids. A continuation has up to `tokens` and ends before one of `ends`."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: int
    ends: tuple[int, ...]
    tokenizer: Path  # tokenizer.json

    def decoder(self) -> Callable[[Sequence[Sequence[int]]], dict[str, str]]:
        """Function that returns the text of each prompt's continuation, by prompt."""
        words = Tokenizer.from_file(str(self.tokenizer))

        def named(continuations: Sequence[Sequence[int]]) -> dict[str, str]:
            texts = (words.decode(list(ids), skip_special_tokens=False) for ids in continuations)
            return dict(zip(self.texts, texts, strict=True))

        return named


class Sample(TypedDict):
    """Continuation of a prompt by the model of a step."""

    step: int
    prompt: str
    text: str


def generate(
    next_tokens: NextTokens,
    prompts: Sequence[Sequence[int]],
    most: int,
    ends: Collection[int],
    context: int,
    *,
    multiple: int = PAD_TO,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Greedy continuations of up to `most` tokens, without a KV cache. A continuation ends before a token of `ends`.

    Every call of `next_tokens` has the same shape, whose width is a multiple of `multiple` or the context. Padding is on the
    right, where a causal model does not see it. Ranks that share a model must return the same tokens: they stop when all rows
    have ended.
    """
    needed = max(map(len, prompts)) + most
    assert needed <= context and all(prompts), f"prompts of up to {needed - most} tokens, most={most}, context={context}"
    width = min(context, -(-needed // multiple) * multiple)
    tokens_bt = torch.zeros((len(prompts), width), dtype=torch.long, device=device)
    for row, ids in enumerate(prompts):
        tokens_bt[row, : len(ids)] = torch.tensor(ids)
    lengths_b = torch.tensor([len(ids) for ids in prompts], device=device)
    rows_b = torch.arange(len(prompts), device=device)
    found: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(most):
        next_b = next_tokens(tokens_bt, lengths_b - 1)
        tokens_bt[rows_b, lengths_b] = next_b
        lengths_b += 1
        for row, token in enumerate(next_b.tolist()):
            if token in ends:
                running.discard(row)
            elif row in running:
                found[row].append(token)
        if not running:
            break
    return found


def path(run: Run) -> Path:
    return run.path / "samples.jsonl"


def lines(step: int, texts: Mapping[str, str]) -> list[Sample]:
    return [Sample(step=step, prompt=prompt, text=text) for prompt, text in texts.items()]


def read(run: Run) -> list[Sample]:
    """Samples in the order of their steps. Lines that a kill truncated are left out."""
    try:
        raw = path(run).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [sample for line in raw if (sample := parse(line)) is not None]


def cut(run: Run, step: int) -> None:
    """Removes samples after `step`, for a run that resumes there."""
    records.cut(path(run), step, parse)


def parse(line: bytes) -> Sample | None:
    """Sample of a line, None if a kill or a failing disk left it unreadable."""
    try:
        raw = json.loads(line) if line.endswith(b"\n") else None
        return Sample(step=int(raw["step"]), prompt=str(raw["prompt"]), text=str(raw["text"])) if raw else None
    except (ValueError, KeyError, TypeError):
        return None
