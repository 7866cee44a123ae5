"""Attention forward and backward against torch (FA2, cuDNN, FlexAttention) and, forward only, vLLM's FA3.

FLOPs follow the usual convention: 4 * head_dim for every pair of a query and a key, half of the pairs if causal, and 2.5 times
that for the backward pass, regardless of recomputation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.flash_attention.flash_attention import flash_attention, reference

FORWARD_BARS = (Bar(500, "TFLOP/s"), Bar(1.0, "SDPA cuDNN"))
BACKWARD_BARS = (Bar(1.2, "SDPA FA2"),)
EAGER_LIMIT = 4 << 30  # bytes of scores
DOCUMENTS = (6000, 200, 3000, 17, 1000, 64, 4000, 1, 1500, 602)  # 16k tokens, as in text corpora: few long, many short


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int = 128
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    keys: int | None = None  # None: as many as tokens
    model: str = ""

    def pairs(self) -> int:
        """Pairs of a query and a key it attends to, per head."""
        if self.window is not None:
            return self.batch * (self.window * self.tokens - self.window * (self.window - 1) // 2)
        whole = self.batch * self.tokens * self.keys if self.keys else sum(length**2 for length in self.lengths())
        return whole // 2 if self.causal else whole

    def lengths(self) -> tuple[int, ...]:
        return self.documents or (self.tokens,) * self.batch

    def name(self) -> str:
        if self.model:
            keys = f" to {self.keys}" if self.keys else ""
            return f"{self.model}: full d{self.dim}, {self.batch} x {self.tokens}{keys}, {self.heads} heads"
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads} heads"
        kind = "documents" if self.documents else f"window {self.window}" if self.window else "causal" if self.causal else "full"
        return f"{kind} d{self.dim}, {self.batch} x {self.tokens // 1024}k, {heads}"


@dataclass(frozen=True)
class Inputs:
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


Attention = Callable[[Inputs], Tensor]  # [batch, tokens, heads, dim]

SHAPES_WITH_BARS = (Shape(2, 8192, 16, 16), Shape(2, 16384, 16, 16), Shape(2, 8192, 32, 8), Shape(1, 16384, 32, 8))
OTHER_SHAPES = (
    Shape(4, 4096, 16, 16),
    Shape(4, 4096, 32, 8),
    Shape(2, 8192, 32, 32, dim=64),
    Shape(2, 8192, 8, 8, dim=256),
    Shape(2, 8192, 16, 16, causal=False),
    Shape(1, 16384, 16, 16, window=1024),
    Shape(1, sum(DOCUMENTS), 16, 16, documents=DOCUMENTS),
    Shape(4, 1024, 16, 16),  # small enough for eager attention's scores
)
# Widths of heads that are no power of two, and sequences so short that one wave of programs computes them.
WIDTHS_AND_SHORT = (
    Shape(2, 8192, 16, 16, dim=80),
    Shape(2, 8192, 16, 16, dim=96),
    Shape(2, 8192, 16, 16, dim=160),
    Shape(4, 1024, 16, 16, dim=64, causal=False),
)


# Of diffusion transformers. A batch of 2 is one picture with classifier-free guidance; FLUX has its guidance distilled. SD3 and
# FLUX attend to text and picture together, PixArt to the text in a second attention (torch: without the mask of padding).
PICTURE_SHAPES = (
    Shape(2, 4096 + 333, 24, 24, dim=64, causal=False, model="SD3 1024px"),
    Shape(2, 4096 + 154, 24, 24, dim=64, causal=False, model="SD3 1024px, CLIP text"),
    Shape(1, 4096 + 512, 24, 24, causal=False, model="FLUX 1024px"),
    Shape(2, 4096, 16, 16, dim=72, causal=False, model="PixArt 1024px"),
    Shape(2, 4096, 16, 16, dim=72, causal=False, keys=300, model="PixArt 1024px, text"),
    Shape(2, 4096, 16, 16, dim=72, causal=False, keys=120, model="PixArt 1024px, text"),
    Shape(2, 1024, 16, 16, dim=72, causal=False, model="DiT-XL/2 512px"),
    Shape(1, 16384 + 512, 24, 24, causal=False, model="FLUX 2048px"),
    Shape(1, 16384, 24, 24, causal=False, model="video"),
    Shape(1, 32768, 24, 24, causal=False, model="video"),
    Shape(2, 17776, 30, 30, dim=64, causal=False, model="CogVideoX 2B"),
)
AT_LEAST_CUDNN = (Bar(1.0, "SDPA cuDNN"),)


def picture_cases() -> list[Case]:
    """Full attention in the shapes of diffusion transformers, forward."""
    return [_case(shape, backward=False, bars=AT_LEAST_CUDNN) for shape in PICTURE_SHAPES]


def cases() -> list[Case]:
    return [
        *(_case(shape, backward=False, bars=FORWARD_BARS) for shape in SHAPES_WITH_BARS),
        *(_case(shape, backward=False) for shape in OTHER_SHAPES),
        *(_case(shape, backward=False, bars=AT_LEAST_CUDNN) for shape in WIDTHS_AND_SHORT),
        *(_case(shape, backward=True, bars=BACKWARD_BARS) for shape in (*SHAPES_WITH_BARS, *OTHER_SHAPES[:2])),
        *(_case(shape, backward=True) for shape in OTHER_SHAPES[2:]),
        *picture_cases(),
    ]


def _case(shape: Shape, *, backward: bool, bars: tuple[Bar, ...] = ()) -> Case:
    name = f"{'backward' if backward else 'forward'} {shape.name()}"
    return Case("flash_attention", name, partial(_build, shape, backward), bars)


def _build(shape: Shape, backward: bool, device: torch.device) -> Contest:
    inputs = _inputs(shape, device)
    run = _Backward if backward else partial
    attentions: dict[str, Attention | Missing] = {
        OURS: _ours,
        "torch eager": _eager(shape, _reference),
        "torch.compile": _eager(shape, torch.compile(_reference)),
        "SDPA FA2": _fa2(shape),
        "SDPA cuDNN": _cudnn(shape),
        "FlexAttention": Missing("not compiled for each shape of a diffusion transformer") if shape.model else _flex(inputs),
        "vLLM FA3": Missing("forward only") if backward else _vllm_fa3(device),
    }
    contenders: dict[str, Callable[[], Any] | Missing] = {
        name: one if isinstance(one, Missing) else run(one, inputs) for name, one in attentions.items()
    }
    read_and_written = 2 * (inputs.q.nbytes + inputs.k.nbytes) * (2 if backward else 1)
    return Contest(
        contenders,
        reference=partial(_exact, inputs, backward),
        tolerance=1e-2,
        bytes=read_and_written,
        flops=4 * shape.pairs() * shape.heads * shape.dim * (5 if backward else 2) // 2,
    )


def _inputs(shape: Shape, device: torch.device) -> Inputs:
    q, k, v, dout = (
        torch.randn(shape.batch, tokens, heads, shape.dim, device=device, dtype=torch.bfloat16)
        for tokens, heads in (
            (shape.tokens, shape.heads),
            (shape.keys or shape.tokens, shape.kv_heads),
            (shape.keys or shape.tokens, shape.kv_heads),
            (shape.tokens, shape.heads),
        )
    )
    cu_seqlens = torch.tensor([0, *accumulate(shape.lengths())], device=device, dtype=torch.int32)
    return Inputs(shape, q, k, v, dout, cu_seqlens)


class _Backward:
    """The gradients alone; the forward pass runs once, at the first call."""

    def __init__(self, attention: Attention, inputs: Inputs) -> None:
        self.attention, self.inputs = attention, inputs
        self.learned: list[Tensor] = []
        self.out: Tensor | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        if self.out is None:
            q, k, v = self.learned = [x.detach().requires_grad_() for x in self.inputs.qkv]
            with torch._functorch.config.patch(donated_buffer=False):  # saved tensors must outlive the first backward pass
                self.out = self.attention(replace(self.inputs, q=q, k=k, v=v))
        return torch.autograd.grad(self.out, self.learned, self.inputs.dout, retain_graph=True)


def _ours(inputs: Inputs) -> Tensor:
    shape = inputs.shape
    packed = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": max(shape.lengths())} if shape.documents else {}
    return flash_attention(*inputs.qkv, causal=shape.causal, window=shape.window, **packed)  # type: ignore[arg-type]


def _reference(inputs: Inputs) -> Tensor:
    shape = inputs.shape
    cu_seqlens = inputs.cu_seqlens if shape.documents else None
    return reference(*inputs.qkv, causal=shape.causal, window=shape.window, cu_seqlens=cu_seqlens)


def _eager(shape: Shape, attention: Attention) -> Attention | Missing:
    if shape.model:
        return Missing("no diffusion transformer writes its scores to memory")
    scores = 2 * shape.batch * shape.heads * shape.tokens**2
    return attention if scores <= EAGER_LIMIT else Missing(f"its scores need {scores >> 30} GB")


def _fa2(shape: Shape) -> Attention:
    if shape.window is None and shape.documents is None:
        return partial(_sdpa, SDPBackend.FLASH_ATTENTION)
    return _fa2_varlen


def _cudnn(shape: Shape) -> Attention | Missing:
    if shape.window is not None or shape.documents is not None:
        return Missing("SDPA has no windows and no documents")
    return partial(_sdpa, SDPBackend.CUDNN_ATTENTION)


def _sdpa(backend: SDPBackend, inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
    grouped = inputs.shape.heads != inputs.shape.kv_heads
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=inputs.shape.causal, enable_gqa=grouped).transpose(1, 2)


def _fa2_varlen(inputs: Inputs) -> Tensor:
    """FA2's variable-length kernel, which supports windows and documents although SDPA does not expose them."""
    shape, longest = inputs.shape, max(inputs.shape.lengths())
    window = {} if shape.window is None else {"window_size_left": shape.window - 1, "window_size_right": 0}
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(x.flatten(0, 1) for x in inputs.qkv),
        *(inputs.cu_seqlens, inputs.cu_seqlens, longest, longest),
        *(0.0, shape.causal, False),
        **window,
    )
    return out.view(inputs.q.shape)  # type: ignore[no-any-return]


def _flex(inputs: Inputs) -> Attention | Missing:
    if not inputs.q.is_cuda:
        return Missing("needs a GPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = inputs.shape
    document = torch.bucketize(torch.arange(shape.tokens, device=inputs.q.device), inputs.cu_seqlens[1:], right=True)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if shape.window is not None:
            seen = seen & (query - key < shape.window)
        if shape.documents is not None:
            seen = seen & (document[query] == document[key])
        return seen

    mask = create_block_mask(sees, None, None, shape.tokens, shape.tokens, inputs.q.device) if shape.causal else None
    compiled = torch.compile(flex_attention)

    def run(inputs: Inputs) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads)
        return out.transpose(1, 2)

    return run


def _vllm_fa3(device: torch.device) -> Attention | Missing:
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError as error:
        return Missing(str(error))
    if device.type != "cuda" or not is_fa_version_supported(3):
        return Missing("FA3 needs Hopper")

    def run(inputs: Inputs) -> Tensor:
        shape, longest = inputs.shape, max(inputs.shape.lengths())
        keys = shape.keys or longest
        cu_seqlens = inputs.cu_seqlens * keys // shape.tokens if shape.keys else inputs.cu_seqlens
        out: Tensor = flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in inputs.qkv),
            max_seqlen_q=longest,
            cu_seqlens_q=inputs.cu_seqlens,
            max_seqlen_k=keys,
            cu_seqlens_k=cu_seqlens,
            causal=shape.causal,
            window_size=None if shape.window is None else [shape.window - 1, 0],
            fa_version=3,
        )
        return out.view(inputs.q.shape)

    return run


def _exact(inputs: Inputs, backward: bool) -> tuple[Tensor, ...]:
    """Exact result in fp32, one head of a sequence at a time: all scores would not fit in memory."""
    shape = inputs.shape
    group = shape.heads // shape.kv_heads
    cu_seqlens = inputs.cu_seqlens if shape.documents else None
    out, dq = (torch.empty(inputs.q.shape, device=inputs.q.device) for _ in range(2))
    dk, dv = (torch.zeros(inputs.k.shape, device=inputs.q.device) for _ in range(2))
    for row in range(shape.batch):
        for head in range(shape.heads):
            own, kv = (
                (slice(row, row + 1), slice(None), slice(head, head + 1)),
                (slice(row, row + 1), slice(None), [head // group]),
            )
            learned = [x[at].float().requires_grad_(backward) for x, at in ((inputs.q, own), (inputs.k, kv), (inputs.v, kv))]
            result = reference(*learned, causal=shape.causal, window=shape.window, cu_seqlens=cu_seqlens)
            if backward:
                of_q, of_k, of_v = torch.autograd.grad(result, learned, inputs.dout[own].float())
                dq[own] = of_q
                dk[kv] += of_k
                dv[kv] += of_v
            else:
                out[own] = result
    return (dq, dk, dv) if backward else (out,)
