"""Samples the next token of every sequence: penalties, temperature, min-p, top-k, top-p, and a seeded draw.

The filters are applied in this order, as in vLLM. Tokens with equal logits are selected or dropped together, so that the set of
candidates does not depend on an order of sorting. The draw of a row depends on its logits, settings, seed and step alone, not on
the rest of the batch.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.ops.sample.kernel import COLUMNS, GREEDY, LOG2_E, LOWEST, RUN, TILE, sample_triton, tunable
from strata.kernels.ops.sample.noise import SEGMENTS, TOKENS, log2_noise
from strata.kernels.tuning.tunable import Config, TuningCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Penalties(NamedTuple):
    """Tokens of each row's prompt and output, every token once [rows, n], int32, padded with -1; how often each is in the output
    [rows, n], int32; and the penalties [rows], fp32. `token_counts` makes the first two."""

    tokens: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def token_counts(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """`tokens` and `counts` of `Penalties`, on the CPU."""
    rows = [dict.fromkeys(prompt, 0) | Counter(output) for prompt, output in zip(prompts, outputs, strict=True)]
    width = max((len(row) for row in rows), default=0)
    tokens = torch.full((len(rows), width), -1, dtype=torch.int32)
    counts = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(list(row), dtype=torch.int32)
        counts[number, : len(row)] = torch.tensor(list(row.values()), dtype=torch.int32)
    return tokens, counts


def penalized(logits: Tensor, penalties: Penalties) -> Tensor:
    """Logits in which the listed tokens are divided by `repetition`, or multiplied if negative, and lowered by `frequency` times
    their count and by `presence` if counted. Rounded to the dtype of the logits."""
    tokens, counts, repetition, frequency, presence = penalties
    out = logits.clone()
    for row in range(logits.shape[0]):
        listed = (tokens[row] >= 0) & (tokens[row] < logits.shape[1])
        token, count = tokens[row][listed].long(), counts[row][listed].float()
        x = out[row, token].float()
        x = torch.where(x > 0, x / repetition[row], x * repetition[row])
        x = x - frequency[row] * count - torch.where(count > 0, presence[row], 0.0)
        out[row, token] = x.to(out.dtype)
    return out


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """log2 of weights up to a constant, finite; greedy rows as they are."""
    greedy = temperature < GREEDY
    return (logits.float() * torch.where(greedy, 1.0, LOG2_E / temperature)[:, None]).clamp(min=LOWEST)


def candidate_mask(x: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Tokens [rows, vocabulary] that pass min-p, top-k and top-p, for scaled logits. A top-k of 0 and a top-p of 1 pass all."""
    vocabulary = x.shape[1]
    mask = torch.ones_like(x, dtype=torch.bool)
    largest = x.max(1, keepdim=True).values
    if min_p is not None:
        mask = (min_p <= 0)[:, None] | (x >= largest + torch.log2(min_p.clamp(min=0))[:, None])
    ordered = x.sort(1, descending=True).values
    if top_k is not None:
        k = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()
        mask = mask & (x >= ordered.gather(1, k[:, None] - 1))
    if top_p is not None:
        weights = torch.where(mask, torch.exp2(x - largest), 0.0).double().sort(1, descending=True).values
        sums = weights.cumsum(1)
        needed = (sums < top_p[:, None].double() * sums[:, -1:]).sum(1, keepdim=True).clamp(max=vocabulary - 1)
        mask = mask & ((top_p >= 1)[:, None] | (x >= ordered.gather(1, needed)))
    return mask


def drawn(x: Tensor, mask: Tensor, seeds: Tensor, steps: Tensor, greedy: Tensor, filtered: Tensor) -> Tensor:
    """The token of each row. Rows without filters draw a segment of tokens first, then a token of it."""
    rows, vocabulary = x.shape
    ids = torch.arange(vocabulary, device=x.device)
    segment = ids // TILE * (COLUMNS // RUN) + ids % COLUMNS // RUN
    used = segment.unique()
    largest = x.max(1, keepdim=True).values.double()
    sums = x.new_zeros(rows, int(segment.max()) + 1, dtype=torch.float64)
    mass = sums.index_add_(1, segment, torch.exp2(x.double() - largest))[:, used].log2() + largest
    race = mass.float() - log2_noise(seeds, steps, used, SEGMENTS)
    mask = torch.where(filtered[:, None], mask, segment == used[race.argmax(1, keepdim=True)])
    score = torch.where(mask, x - log2_noise(seeds, steps, ids, TOKENS), -torch.inf)
    return torch.where(greedy, x.argmax(1), score.argmax(1))


def reference(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    penalties: Penalties | None = None,
) -> Tensor:
    x = scaled(logits if penalties is None else penalized(logits, penalties), temperature.float())
    filtered = torch.zeros_like(temperature, dtype=torch.bool)
    if top_k is not None:
        filtered |= (top_k > 0) & (top_k < logits.shape[1])
    if top_p is not None:
        filtered |= top_p < 1
    if min_p is not None:
        filtered |= min_p > 0
    return drawn(x, candidate_mask(x, top_k, top_p, min_p), seeds, steps, temperature < GREEDY, filtered)


def sample_cpu(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *penalties: Tensor | None,
) -> Tensor:
    if penalties[0] is not None:
        logits.copy_(penalized(logits, Penalties(*penalties)))  # type: ignore[arg-type]
    return reference(logits, seeds, steps, temperature, top_k, top_p, min_p)


def tuning_cases(device: torch.device) -> list[TuningCase]:
    numbers, temperature = torch.arange(256, device=device), torch.ones(256, device=device)
    top_p = torch.full((256,), 0.95, device=device)
    top_k = numbers.int() % 64 + 1
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(256, 151_936, device=device) * 3).to(dtype)

        def run(chosen: Config, logits: Tensor = logits) -> None:
            penalties = (None,) * 5
            sample_triton(logits, numbers, numbers, temperature, top_k, top_p, None, *penalties, chosen=chosen.arguments())

        cases.append(TuningCase(tunable, (logits.element_size(),), run))
    return cases


library = torch.library.Library("strata", "FRAGMENT")
library.define(
    "sample(Tensor(a!) logits, Tensor seeds, Tensor steps, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
    "Tensor? tokens, Tensor? counts, Tensor? repetition, Tensor? frequency, Tensor? presence) -> Tensor"
)
library.impl("sample", sample_cpu, "CPU")
library.impl("sample", on_tensor_device(sample_triton), "CUDA")


@torch.library.register_fake("strata::sample", lib=library)
def _(logits: Tensor, seeds: Tensor, *more: Tensor | None) -> Tensor:
    return seeds.new_empty(logits.shape[0], dtype=torch.int64)


def sample(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    penalties: Penalties | None = None,
) -> Tensor:
    """A token of every row of logits [rows, vocabulary], int64.

    - seeds, steps [rows], int64: seed of the request and number of its token. Equal ones repeat a draw.
    - temperature [rows], fp32: below 1e-5, the largest logit is selected, and of equal ones the first.
    - top_k [rows], int32: 0 for all. Tokens equal to the last one are included, here and for top_p.
    - top_p [rows], fp32: 1 for all. min_p [rows], fp32: 0 for all.

    `penalties` overwrite the logits of the listed tokens, in place.
    """
    rows = logits.shape[:1]
    if logits.dim() != 2 or logits.dtype not in DTYPES or (logits.shape[1] != 1 and logits.stride(1) != 1):
        raise ValueError(
            "sample expects logits [rows, vocabulary] in float32, bfloat16 or float16 with contiguous rows, "
            f"got {list(logits.shape)} {logits.dtype} with strides {logits.stride()}"
        )
    if not logits.shape[1]:
        raise ValueError("sample expects a vocabulary of at least one token")
    for name, given, dtype in (
        ("seeds", seeds, torch.int64),
        ("steps", steps, torch.int64),
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        *((field, getattr(penalties, field), torch.float32) for field in ("repetition", "frequency", "presence") if penalties),
    ):
        if given is not None and (given.shape != rows or given.dtype != dtype or not given.is_contiguous()):
            raise ValueError(f"sample expects {name} [{rows[0]}] in {dtype}, contiguous, got {list(given.shape)} {given.dtype}")
    if penalties is not None:
        tokens, counts = penalties.tokens, penalties.counts
        if tokens.dim() != 2 or tokens.shape[:1] != rows or tokens.dtype != torch.int32 or counts.dtype != torch.int32:
            raise ValueError(f"sample expects penalized tokens [{rows[0]}, n] in int32, got {list(tokens.shape)} {tokens.dtype}")
        if counts.shape != tokens.shape or not (tokens.is_contiguous() and counts.is_contiguous()):
            raise ValueError(f"sample expects contiguous tokens and counts of one shape, got {list(counts.shape)} counts")
    return torch.ops.strata.sample(  # type: ignore[no-any-return]
        logits, seeds, steps, temperature, top_k, top_p, min_p, *(penalties or (None,) * 5)
    )
