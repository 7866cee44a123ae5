"""Small samples of every operation: laptop-sized for CPUs, against torch, and tiny to time a launch alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels import catalog
from strata.kernels.bench.case import OURS, Case, Contest
from strata.kernels.ops.w4a16_linear.packing import pack

TOLERANCE = 1e-5  # fp32
LAPTOP = 4  # scale of a sample: milliseconds on a few cores, negligible work on a GPU
TINY = 1


@dataclass(frozen=True)
class Sample:
    """A call of an operation. `learned` are the indices of `arguments` that need a gradient, `written` those that an in-place
    operation writes."""

    op: str
    arguments: tuple[Any, ...]
    learned: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    written: tuple[int, ...] = ()

    def call(self, function: Callable[..., Any]) -> Callable[[], Any]:
        return partial(function, *self.arguments, **dict(self.options))

    def widened(self) -> "Sample":
        arguments = tuple(one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for one in self.arguments)
        return replace(self, arguments=arguments)


def cases() -> list[Case]:
    """CPU cases: Strata against eager torch, forward, and forward with backward for differentiable operations."""
    return [
        Case(name, "forward and backward" if backward else "forward", partial(_contest, name, backward))
        for name, make in SAMPLES.items()
        for backward in ((False, True) if make(torch.device("meta"), torch.float32, TINY).learned else (False,))
    ]


def tiny_call(op: str, device: torch.device) -> Callable[[], Any]:
    """A call of Strata's operation on tensors so small that only the launch takes time."""
    return SAMPLES[op](device, torch.bfloat16, TINY).call(public(op))


def public(op: str) -> Callable[..., Any]:
    return getattr(_module(op), op)  # type: ignore[no-any-return]


def _contest(op: str, backward: bool, device: torch.device) -> Contest:
    sample = SAMPLES[op](device, torch.float32, LAPTOP)
    torchs_own: dict[str, Callable[..., Any]] = {"rms_norm": _torch_rms_norm, "flash_attention": _torch_attention}
    eager = torchs_own.get(op) or _reference(op)
    run: Callable[[Sample, Callable[..., Any]], tuple[Tensor, ...]] = _gradients if backward else _outputs
    inputs = [one for one in sample.arguments if isinstance(one, Tensor)]
    outputs = _outputs(sample, public(op))
    return Contest(
        contenders={OURS: partial(run, sample, public(op)), "torch eager": partial(run, sample, eager)},
        reference=partial(run, sample.widened(), _reference(op)),
        tolerance=TOLERANCE,
        bytes=sum(one.nbytes for one in (*inputs, *outputs)) * (3 if backward else 1),
    )


def _reference(op: str) -> Callable[..., Any]:
    return _module(op).reference  # type: ignore[no-any-return]


def _module(op: str) -> ModuleType:
    [found] = catalog.chosen([op])
    return found.module()


def _outputs(sample: Sample, function: Callable[..., Any]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        outputs = sample.call(function)()
    if sample.written:
        return tuple(sample.arguments[index] for index in sample.written)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _gradients(sample: Sample, function: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Gradients of the sum of squares of the outputs, which depends on the sign and order of every output."""
    arguments = list(sample.arguments)
    for index in sample.learned:
        arguments[index] = arguments[index].detach().requires_grad_()
    outputs = function(*arguments, **dict(sample.options))
    total = sum(one.square().sum() for one in ((outputs,) if isinstance(outputs, Tensor) else outputs))
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, [arguments[index] for index in sample.learned])


def _rms_norm(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    x = torch.randn(128 * scale, 256 * scale, device=device, dtype=dtype)
    return Sample("rms_norm", (x, torch.randn(256 * scale, device=device, dtype=dtype), 1e-6), (0, 1))


def _rope(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    tokens, dim = 64 * scale, 64
    q = torch.randn(1, tokens, 2 * scale, dim, device=device, dtype=dtype)
    k = torch.randn(1, tokens, scale, dim, device=device, dtype=dtype)
    angles = torch.rand(tokens, dim // 2, device=device) * 6.28
    return Sample("rope", (q, k, angles.cos(), angles.sin()), (0, 1))


def _swiglu(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    gate, up = (torch.randn(128 * scale, 256 * scale, device=device, dtype=dtype) for _ in range(2))
    return Sample("swiglu", (gate, up), (0, 1))


def _linear_cross_entropy(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    x = torch.randn(64 * scale, 64 * scale, device=device, dtype=dtype)
    weight = torch.randn(512 * scale, 64 * scale, device=device, dtype=dtype) * (64 * scale) ** -0.5
    return Sample("linear_cross_entropy", (x, weight, torch.randint(0, 512 * scale, (64 * scale,), device=device)), (0, 1))


def _flash_attention(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    q, k, v = (torch.randn(1, 64 * scale, heads, 64, device=device, dtype=dtype) for heads in (4, 2, 2))
    return Sample("flash_attention", (q, k, v), (0, 1, 2))


def _paged_attention(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    """`scale` sequences with one query each, over contexts of 64 * scale tokens in blocks of 16."""
    seqs, context, block = scale, 64 * scale, 16
    blocks = context // block
    caches = (torch.randn(seqs * blocks, block, 2, 64, device=device, dtype=dtype) for _ in range(2))
    tables = torch.randperm(seqs * blocks, device=device).view(seqs, blocks).int()
    lengths = torch.full((seqs,), context, device=device, dtype=torch.int32)
    starts = torch.arange(seqs + 1, device=device, dtype=torch.int32)
    q = torch.randn(seqs, 8, 64, device=device, dtype=dtype)
    options = (("max_query_len", 1), ("max_context_len", context))
    return Sample("paged_attention", (q, *caches, tables, lengths, starts), (), options)


def _kv_cache_write(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    tokens, block = 16 * scale, 16
    key, value = (torch.randn(tokens, 2, 64, device=device, dtype=dtype) for _ in range(2))
    caches = (torch.zeros(2 * tokens // block, block, 2, 64, device=device, dtype=dtype) for _ in range(2))
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    return Sample("kv_cache_write", (key, value, *caches, slots), written=(2, 3))


def _w4a16_linear(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    """Four tokens, and weights with zero points for groups of 128 inputs."""
    inputs, outputs = 128 * scale, 256 * scale
    nibbles = torch.randint(0, 16, (inputs, outputs), device=device, dtype=torch.uint8)
    scales = torch.rand(scale, outputs, device=device).to(dtype)
    zeros = torch.arange(outputs, device=device).remainder(16).expand(scale, -1)
    return Sample("w4a16_linear", (torch.randn(4, inputs, device=device, dtype=dtype), *pack(nibbles, scales, zeros)))


def _sample(device: torch.device, dtype: torch.dtype, scale: int) -> Sample:
    rows = 2 * scale
    logits = torch.randn(rows, 512 * scale, device=device).to(dtype)
    numbers = torch.arange(rows, device=device)
    return Sample("sample", (logits, numbers, numbers, torch.ones(rows, device=device), numbers.int() + 1))


SAMPLES: dict[str, Callable[[torch.device, torch.dtype, int], Sample]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "linear_cross_entropy": _linear_cross_entropy,
    "flash_attention": _flash_attention,
    "paged_attention": _paged_attention,
    "kv_cache_write": _kv_cache_write,
    "w4a16_linear": _w4a16_linear,
    "sample": _sample,
}


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
