"""Single patterns: what is fused computes the same, and what differs in one place is left as it is, with the reason."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.graph.record import Record

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def compiled(function: Callable[..., Any], *arguments: Any) -> Record:
    """The record of a function whose compiled result equals its own."""
    record = Record()
    options = {"tail": "eager", "record": record}
    ours = torch.compile(function, backend="strata", fullgraph=True, options=options)(*arguments)
    torch.testing.assert_close(ours, function(*arguments))
    return record


def assert_left(record: Record, pattern: str, reason: str) -> None:
    assert record.counts() == {}
    (refusal,) = record.refused
    assert refusal.pattern == pattern
    assert reason in refusal.reason


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def test_norms() -> None:
    x, weight = normal(3, 5, 8), normal(8)
    assert compiled(norm, x, weight).counts() == {"rms_norm": 1}
    assert compiled(norm, x.bfloat16(), weight.bfloat16()).counts() == {"rms_norm": 1}


def test_residual_and_norm() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, weight), total * 2

    assert compiled(block, normal(3, 8), normal(3, 8), normal(8)).counts() == {"add_rms_norm": 1}


def test_a_broadcast_addition_is_no_residual() -> None:
    assert compiled(lambda x, y, w: norm(x + y, w), normal(3, 8), normal(8), normal(8)).counts() == {"rms_norm": 1}


def _before_rounding(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


def _written_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x.clone()
    variance = x.pow(2).mean(-1, keepdim=True)
    x.add_(1)
    return weight * (x * torch.rsqrt(variance + 1e-5))


ALTERED = {
    "eps outside of the root": (lambda x, w: w * (x * (x.pow(2).mean(-1, keepdim=True).rsqrt() + 1e-5)), "eps is not added"),
    "no eps": (lambda x, w: w * (x * x.pow(2).mean(-1, keepdim=True).rsqrt()), "eps is not added"),
    "cubes": (lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-5)), "not of squares"),
    "other dimension": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)), "not over the last"),
    "other values": (lambda x, w: w * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), "does not multiply"),
    "no weight": (lambda x, w: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).sin(), "not a product"),
    "root": (lambda x, w: w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()), "not rsqrt"),
    "written between": (_written_between, "in place"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_altered_norms_are_left(name: str) -> None:
    function, reason = ALTERED[name]
    x, weight = normal(6, 8), normal(8)
    assert_left(compiled(function, x, weight), "rms_norm", reason)


def test_norms_with_other_dtypes_are_left() -> None:
    x, weight = normal(6, 8, dtype=torch.bfloat16), normal(8)
    assert_left(compiled(norm, x, weight), "rms_norm", "the weight is torch.float32")
    assert_left(compiled(_before_rounding, x, weight.bfloat16()), "rms_norm", "not rounded")
    narrow = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))  # noqa: E731
    assert_left(compiled(narrow, x, weight.bfloat16()), "rms_norm", "not in fp32")


def test_gated_activations() -> None:
    gate, up = normal(4, 6), normal(4, 6)
    assert compiled(lambda g, u: F.silu(g) * u, gate, up).counts() == {"swiglu": 1}
    assert compiled(lambda g, u: u * F.silu(g), gate, up).counts() == {"swiglu": 1}
    assert_left(compiled(lambda g, u: F.gelu(g) * u, gate, up), "swiglu", "gelu")
    assert_left(compiled(lambda g, u: F.silu(g) * u[:1], gate, up), "swiglu", "different shapes")
    assert_left(compiled(_used_twice, gate, up), "swiglu", "used 2 times")


def _used_twice(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    active = F.silu(gate)
    return active * up, active


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def tables(angles: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat((angles, other), dim=-1)
    return both.cos().unsqueeze(1), both.sin().unsqueeze(1)


@pytest.mark.parametrize("rows", [1, 2])
def test_rotary_embedding(rows: int) -> None:
    def both(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = tables(angles, angles)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    assert compiled(both, normal(2, 4, 5, 8), normal(2, 2, 5, 8), normal(rows, 5, 4)).counts() == {"rope": 1}


def test_other_rotations_are_left() -> None:
    q, k, angles = normal(2, 4, 5, 8), normal(2, 2, 5, 8), normal(1, 5, 4)

    def different_halves(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = tables(angles, 2 * angles)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def alone(q: Tensor, angles: Tensor) -> Tensor:
        return rotate(q, *tables(angles, angles))

    def given(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotate(k, cos.unsqueeze(1), sin.unsqueeze(1))

    assert_left(compiled(different_halves, q, k, angles), "rope", "may differ")
    assert_left(compiled(alone, q, angles), "rope", "1 tensors")
    record = compiled(given, q, k, normal(1, 5, 8), normal(1, 5, 8))
    assert record.counts() == {} and record.refused


Q, K, V = normal(2, 4, 6, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def repeated(x: Tensor) -> Tensor:
    b, h, s, e = x.shape
    return x[:, :, None, :, :].expand(b, h, 2, s, e).reshape(b, h * 2, s, e)


def mask(tokens: int, sees: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    q = torch.arange(tokens)[None, None, :, None]
    return sees(torch.arange(tokens)[None, None, None, :], q).expand(2, -1, tokens, tokens)


def test_causal_attention() -> None:
    assert compiled(lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), Q, K, V).counts() == {"flash_attention": 1}
    spread = lambda q, k, v: attend(q, repeated(k), repeated(v), is_causal=True, scale=0.3)  # noqa: E731
    assert compiled(spread, Q, K, V).counts() == {"flash_attention": 1}


def test_full_attention_to_as_many_or_fewer_keys() -> None:
    """Attention of diffusion transformers: tokens of a picture among themselves, and to the text."""
    assert compiled(lambda q, k, v: attend(q, repeated(k), repeated(v)), Q, K, V).counts() == {"flash_attention": 1}
    text = normal(2, 4, 3, 8)
    assert compiled(lambda q, k: attend(q, k, k, is_causal=False, scale=0.3), Q, text).counts() == {"flash_attention": 1}


@pytest.mark.parametrize(
    "sees",
    [
        lambda kv, q: kv <= q,
        lambda kv, q: q >= kv,
        lambda kv, q: q + 1 > kv,
        lambda kv, q: (kv <= q) & (kv > q - 3),
        lambda kv, q: (kv <= q) & (q - kv < 2),
    ],
)
def test_causal_masks_with_and_without_a_window(sees: Callable[[Tensor, Tensor], Tensor]) -> None:
    record = compiled(lambda q, k, v: attend(q, repeated(k), repeated(v), attn_mask=mask(6, sees)), Q, K, V)
    assert record.counts() == {"flash_attention": 1}


def test_positions_that_are_written_to() -> None:
    def counted_on(q: Tensor, offset: int) -> Tensor:
        keys = torch.arange(6)
        keys += offset
        return attend(q, q, q, attn_mask=(keys[None, None, None, :] <= torch.arange(6)[None, None, :, None]).expand(2, -1, 6, 6))

    def through_a_view(q: Tensor) -> Tensor:
        keys = torch.arange(6)
        keys[2:].fill_(0)
        return attend(q, q, q, attn_mask=(keys[None, None, None, :] <= torch.arange(6)[None, None, :, None]).expand(2, -1, 6, 6))

    assert compiled(counted_on, Q, 0).counts() == {"flash_attention": 1}
    torch._dynamo.reset()
    assert_left(compiled(counted_on, Q, -1), "flash_attention", "not causal")
    assert_left(compiled(through_a_view, Q), "flash_attention", "in place")


@pytest.mark.parametrize(
    ("sees", "reason"),
    [
        (lambda kv, q: kv <= q + 1, "not causal"),
        (lambda kv, q: kv >= q, "not causal"),
        (lambda kv, q: (kv <= q) & (kv + q > 0), "neither"),
        (lambda kv, q: (kv <= q) | (kv == 0), "no comparison"),
        (lambda kv, q: kv - q < 3, "not causal"),
    ],
)
def test_other_masks_are_left(sees: Callable[[Tensor, Tensor], Tensor], reason: str) -> None:
    record = compiled(lambda q, k, v: attend(q, repeated(k), repeated(v), attn_mask=mask(6, sees)), Q, K, V)
    assert record.counts() == {}
    assert reason in record.refused[0].reason


def test_other_attention_is_left() -> None:
    padding = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    assert_left(
        compiled(lambda q, k, m: attend(q, repeated(k), repeated(k), attn_mask=m), Q, K, padding), "flash_attention", "input"
    )
    longer = normal(2, 4, 9, 8)
    assert_left(compiled(lambda q, k: attend(q, k, k), Q, longer), "flash_attention", "more keys")
    assert_left(compiled(lambda q, k: attend(q, k, k, is_causal=True), Q, longer), "flash_attention", "more keys")
    record = Record()
    noisy = torch.compile(
        lambda q: attend(q, q, q, is_causal=True, dropout_p=0.5), backend="strata", options={"tail": "eager", "record": record}
    )
    noisy(Q)
    assert_left(record, "flash_attention", "dropout (0.5)")


HIDDEN, HEAD = normal(2, 5, 8), normal(11, 8)
TARGETS = torch.tensor([[1, 2, -100, 4, 10], [0, 3, 3, -100, 9]])


def logits_loss(x: Tensor, head: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(x, head).float().view(-1, 11), targets.view(-1), **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
def test_losses(options: dict[str, Any]) -> None:
    targets = TARGETS.clamp(min=0) if "ignore_index" in options else TARGETS
    assert compiled(lambda x, w, t: logits_loss(x, w, t, **options), HIDDEN, HEAD, targets).counts() == {
        "linear_cross_entropy": 1
    }


def test_a_loss_of_cut_logits() -> None:
    def shifted(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, weight).float()[..., :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, 11), targets[..., 1:].contiguous().view(-1))

    assert compiled(shifted, HIDDEN, HEAD, TARGETS).counts() == {"linear_cross_entropy": 1}


def test_gradients_of_a_loss_reach_only_what_asks_for_them() -> None:
    weight = HEAD.clone().requires_grad_()
    record = Record()
    step = torch.compile(logits_loss, backend="strata", fullgraph=True, options={"tail": "aot_eager", "record": record})
    step(HIDDEN, weight, TARGETS).backward()
    (expected,) = torch.autograd.grad(logits_loss(HIDDEN, weight, TARGETS), weight)
    assert record.counts() == {"linear_cross_entropy": 1}
    torch.testing.assert_close(weight.grad, expected)


def test_other_losses_are_left() -> None:
    def returned(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.float().view(-1, 11), targets.view(-1)), logits

    def biased(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight, weight[:, 0]).view(-1, 11), targets.view(-1))

    def capped(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((30 * torch.tanh(F.linear(x, weight) / 30)).view(-1, 11), targets.view(-1))

    for function, reason in ((returned, "returns the loss alone"), (biased, "bias"), (capped, "pass through 'mul'")):
        assert_left(compiled(function, HIDDEN, HEAD, TARGETS), "linear_cross_entropy", reason)
    narrow = (HIDDEN.bfloat16(), HEAD.bfloat16(), TARGETS)
    low = lambda x, w, t: F.cross_entropy(F.linear(x, w).view(-1, 11), t.view(-1))  # noqa: E731
    assert_left(compiled(low, *narrow), "linear_cross_entropy", "not in fp32")
    classes = lambda x, w, t: logits_loss(x, w, t, weight=torch.ones(11))  # noqa: E731
    assert_left(compiled(classes, HIDDEN, HEAD, TARGETS), "linear_cross_entropy", "weights its classes")


def test_products_that_autocast_narrows_are_left() -> None:
    def loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return logits_loss(x, head, targets)

    def attention(q: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, q, q, is_causal=True)

    assert_left(compiled(loss, HIDDEN, HEAD, TARGETS), "linear_cross_entropy", "torch.bfloat16, torch.float32")
    assert_left(compiled(attention, Q), "flash_attention", "torch.bfloat16, torch.float32")


def test_rows_wider_than_the_kernels_are_left() -> None:
    x = torch.ones(1, 65537)
    assert_left(compiled(norm, x, x[0]), "rms_norm", "up to 65536")


def test_the_loss_of_no_tokens_is_zero() -> None:
    nothing = torch.full_like(TARGETS, -100)
    step = torch.compile(logits_loss, backend="strata", options={"tail": "eager"})
    assert step(HIDDEN, HEAD, nothing).item() == 0
    assert math.isnan(logits_loss(HIDDEN, HEAD, nothing).item())
