"""Sample generations during training: greedy continuations of fixed prompts, recorded in `samples.jsonl` of the run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from tokenizers import Tokenizer
from torch import Tensor

from strata.platform.runs import Run
from strata.training.data import tokenizer as bpe
from strata.training.metrics import records

PAD_TO = 64  # tokens; few widths mean few compilations, and sequence-parallel layouts divide them

Logits = Callable[[Tensor], Tensor]  # tokens [batch, time] -> logits [batch, time, vocab]


class Sample(TypedDict):
    """Continuation of a prompt by the model of a step."""

    step: int
    prompt: str
    text: str


def generate(
    logits: Logits,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    context: int,
    *,
    end: int = bpe.END_OF_TEXT_ID,
    device: torch.device | str = "cpu",
) -> list[str]:
    """Greedy continuations of up to `max_tokens`, without a KV cache. A prompt that does not fit loses its beginning; a text ends
    at the token `end`, which also stands for an empty prompt.

    `logits` is called exactly `max_tokens` times with the same shape, on every rank: ranks that share a model must not stop at
    different times. Padding is on the right, where a causal model does not see it.
    """
    assert 0 < max_tokens < context, f"max_tokens={max_tokens} must be between 1 and context={context}"
    if not prompts:
        return []
    encoded = [(tokenizer.encode(prompt, add_special_tokens=False).ids or [end])[-(context - max_tokens) :] for prompt in prompts]
    needed = max(len(ids) for ids in encoded) + max_tokens
    tokens_bt = torch.full((len(prompts), min(context, -(-needed // PAD_TO) * PAD_TO)), end, dtype=torch.long, device=device)
    for row, ids in enumerate(encoded):
        tokens_bt[row, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids in encoded], device=device)
    rows = torch.arange(len(prompts), device=device)
    with torch.no_grad():
        for written in range(max_tokens):
            logits_btv = logits(tokens_bt)
            tokens_bt[rows, lengths + written] = logits_btv[rows, lengths + written - 1].argmax(-1).to(tokens_bt.device)
    texts = []
    for row, ids in zip(tokens_bt.tolist(), encoded, strict=True):
        answer = row[len(ids) : len(ids) + max_tokens]
        texts.append(tokenizer.decode(answer[: answer.index(end)] if end in answer else answer, skip_special_tokens=False))
    return texts


def of_folder(folder: Path, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Continuations by an exported model, with transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ends = model.config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    context = model.config.max_position_embeddings
    return generate(lambda tokens_bt: model(tokens_bt).logits, bpe.load(folder), prompts, max_tokens, context, end=end)


def path(run: Run) -> Path:
    return run.path / "samples.jsonl"


def record(run: Run, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Appends the samples of a step, all or none. First ends a line that a kill truncated."""
    with path(run).open("a+b") as file:
        size = file.tell()
        file.seek(max(0, size - 1))
        if size and file.read() != b"\n":
            file.write(b"\n")
    records.append(path(run), *(Sample(step=step, prompt=prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)))


def read(run: Run) -> list[Sample]:
    """Samples by step. A resumed run repeats steps: of two samples with the same step and prompt the later one counts. Lines
    that a kill truncated are left out."""
    found: dict[tuple[int, str], Sample] = {}
    try:
        lines = path(run).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            raw = json.loads(line)
            sample = Sample(step=int(raw["step"]), prompt=str(raw["prompt"]), text=str(raw["text"]))
        except (ValueError, KeyError, TypeError):
            continue
        found[sample["step"], sample["prompt"]] = sample
    return sorted(found.values(), key=lambda sample: sample["step"])
