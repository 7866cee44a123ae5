"""sample of one and of many rows of 151,936 logits, against the sampler of vLLM, FlashInfer's, and a sort in torch.

Peers draw other random numbers. Their first tokens are compared with the set of candidates instead of with Strata's tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.sample.sample import candidate_mask, reference, sample, scaled

VOCABULARY = 151_936
TEMPERATURE = 0.8
BARS = (Bar(1.5, "vLLM"), Bar(0.8, "copy"))

Sampler = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]  # logits divided by the temperature, top-k, top-p


def cases() -> list[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    return [
        _case("top-k 50, top-p 0.95", 256, fp32, 50, 0.95, BARS),
        _case("top-k 50, top-p 0.95", 256, bf16, 50, 0.95, BARS),
        _case("no filter", 256, fp32, None, None),
        _case("top-p 0.9", 256, fp32, None, 0.9),
        _case("top-p 0.9, flat logits", 256, fp32, None, 0.9, spread=1.0, peaks=0),
        _case("top-k 50, top-p 0.95", 32, fp32, 50, 0.95),
        _case("top-k 50, top-p 0.95", 1, fp32, 50, 0.95),
    ]


def _case(
    name: str,
    rows: int,
    dtype: torch.dtype,
    top_k: int | None,
    top_p: float | None,
    bars: tuple[Bar, ...] = (),
    spread: float = 2.0,
    peaks: int = 20,
) -> Case:
    title = f"{rows} x {VOCABULARY} {'fp32' if dtype == torch.float32 else 'bf16'}, {name}"
    return Case("sample", title, partial(_contest, rows, dtype, top_k, top_p, spread, peaks), bars)


def _contest(
    rows: int, dtype: torch.dtype, top_k: int | None, top_p: float | None, spread: float, peaks: int, device: torch.device
) -> Contest:
    """Normal logits, and per row some likely tokens whose logits are those of a confident model."""
    logits = torch.randn(rows, VOCABULARY, device=device) * spread
    if peaks:
        logits.scatter_add_(
            1, torch.randint(0, VOCABULARY, (rows, peaks), device=device), 14 - torch.rand(rows, peaks, device=device) * 6
        )
    logits = logits.to(dtype)
    seeds = torch.arange(rows, device=device)
    temperature = torch.full((rows,), TEMPERATURE, device=device)
    k = None if top_k is None else torch.full((rows,), top_k, device=device, dtype=torch.int32)
    p = None if top_p is None else torch.full((rows,), top_p, device=device)
    arguments = (logits, seeds, seeds, temperature, k, p)
    truth = reference(*arguments)
    allowed = candidate_mask(scaled(logits, temperature), k, p, None)

    def peer(sampler: Sampler | Missing) -> Callable[[], Tensor] | Missing:
        """Runs a peer. Its first tokens are exchanged for the reference's where they are candidates."""
        if isinstance(sampler, Missing):
            return sampler
        first = True

        def run() -> Tensor:
            nonlocal first
            tokens = sampler(
                logits.float().div(temperature[:, None]) if dtype != torch.float32 else logits.div(temperature[:, None]), k, p
            )
            if first:
                first = False
                tokens = tokens.view(-1).long()
                return torch.where(allowed.gather(1, tokens[:, None])[:, 0], truth, -1)
            return tokens

        return run

    return Contest(
        contenders={
            OURS: partial(sample, *arguments),
            "vLLM": peer(_vllm()),
            "FlashInfer": peer(_flashinfer(top_k, top_p)),
            "torch sort": peer(_sorted),
        },
        reference=lambda: truth,
        tolerance=0.0,
        bytes=logits.nbytes,
    )


def _vllm() -> Sampler | Missing:
    """vLLM's own path: a Triton kernel masks logits, then softmax, exponential noise and argmax."""
    try:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample
    except ImportError as error:
        return Missing(str(error))

    def run(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        return random_sample(apply_top_k_top_p(logits, k, p).softmax(-1, dtype=torch.float32), {})  # type: ignore[no-any-return]

    return run


def _flashinfer(top_k: int | None, top_p: float | None) -> Sampler | Missing:
    if top_k is None and top_p is None:
        return Missing("vLLM uses it with a filter only")
    try:
        from flashinfer import sampling
    except ImportError:
        return Missing("FlashInfer is not installed")

    def run(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        if k is None:
            return sampling.top_p_sampling_from_probs(logits.softmax(-1), p)  # type: ignore[no-any-return]
        return sampling.top_k_top_p_sampling_from_logits(logits, k, 1.0 if p is None else p)  # type: ignore[no-any-return]

    return run


def _sorted(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    if k is None and p is None:
        probs = logits.softmax(-1)
    else:
        ordered, index = logits.sort(-1)
        if k is not None:
            ordered.masked_fill_(ordered < ordered.gather(1, ordered.shape[1] - k.long()[:, None]), -torch.inf)
        if p is not None:
            dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p[:, None]
            dropped[:, -1] = False
            ordered.masked_fill_(dropped, -torch.inf)
        probs = torch.empty_like(logits).scatter_(1, index, ordered).softmax(-1)
    return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1)
