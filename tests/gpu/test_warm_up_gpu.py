"""Warm-up: no batch compiles a kernel afterwards, which would delay a request by seconds."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from strata.kernels.compiler.warm_up import ServedModel, warm_up

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
MODEL = ServedModel(
    heads=16,
    kv_heads=4,
    head_dim=64,
    hidden=1024,
    ffn=2048,
    dtype=torch.bfloat16,
    block_size=16,
    max_tokens=512,
    max_seqs=64,
    max_context=2048,
)


@cache
def warmed() -> int:
    return warm_up(MODEL, DEVICE)


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Names of compiled kernels. Triton calls the hook if a launch finds no kernel for its arguments."""
    from triton import knobs

    compiled: list[str] = []

    def note(*_: object, fn: object, **__: object) -> None:
        compiled.append(getattr(fn, "name", str(fn)))

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield compiled
    finally:
        knobs.runtime.jit_cache_hook = before


def test_hook_detects_a_compilation() -> None:
    from strata.kernels.ops.rms_norm.rms_norm import rms_norm

    with counting_compilations() as compiled:
        rms_norm(torch.randn(3, 96, device=DEVICE), torch.ones(96, device=DEVICE), 1e-6)
    assert compiled


def test_layers_compile_nothing_for_any_token_count() -> None:
    from strata.kernels.ops.kv_cache_write import kv_cache_write
    from strata.kernels.ops.rms_norm.rms_norm import add_rms_norm, rms_norm
    from strata.kernels.ops.rope import rope_
    from strata.kernels.ops.swiglu import swiglu

    assert warmed() > 0
    weight = torch.ones(MODEL.hidden, device=DEVICE, dtype=MODEL.dtype)
    cos, sin = (torch.rand(MODEL.max_context, MODEL.head_dim // 2, device=DEVICE) for _ in range(2))
    cache = torch.zeros(64, MODEL.block_size, MODEL.kv_heads, MODEL.head_dim, device=DEVICE, dtype=MODEL.dtype)
    with counting_compilations() as compiled:
        for tokens in [*range(1, 40), *random.sample(range(40, 513), 40), 512]:
            x = torch.randn(tokens, MODEL.hidden, device=DEVICE, dtype=MODEL.dtype)
            packed = torch.randn(tokens, 2 * MODEL.ffn, device=DEVICE, dtype=MODEL.dtype)
            q = torch.randn(tokens, MODEL.heads, MODEL.head_dim, device=DEVICE, dtype=MODEL.dtype)
            k = torch.randn(tokens, MODEL.kv_heads, MODEL.head_dim, device=DEVICE, dtype=MODEL.dtype)
            places = torch.arange(tokens, device=DEVICE)
            rms_norm(x, weight, MODEL.eps)
            add_rms_norm(x, x, weight, MODEL.eps)
            swiglu(packed[:, : MODEL.ffn], packed[:, MODEL.ffn :])
            rope_(q, k, cos, sin, positions=places)
            kv_cache_write(k, k, cache, cache, places)
    assert not compiled


def test_attention_compiles_nothing_for_any_batch() -> None:
    from strata.kernels.ops.paged_attention.paged_attention import paged_attention

    assert warmed() > 0
    blocks = MODEL.max_context // MODEL.block_size
    cache = torch.randn(256, 16, MODEL.kv_heads, MODEL.head_dim, device=DEVICE, dtype=MODEL.dtype)
    with counting_compilations() as compiled:
        for _ in range(150):
            seqs = random.randint(1, MODEL.max_seqs)
            longest = random.choice([1, 1, random.randint(1, MODEL.max_tokens - seqs + 1)])
            queries = [longest, *[1] * (seqs - 1)]
            contexts = [random.randint(count, MODEL.max_context) for count in queries]
            starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], device=DEVICE, dtype=torch.int32)
            q = torch.randn(sum(queries), MODEL.heads, MODEL.head_dim, device=DEVICE, dtype=MODEL.dtype)
            tables = torch.randint(0, 256, (seqs, blocks), device=DEVICE, dtype=torch.int32)
            lengths = torch.tensor(contexts, device=DEVICE, dtype=torch.int32)
            out = paged_attention(q, cache, cache, tables, lengths, starts, max_query_len=longest, max_context_len=max(contexts))
            assert out.isfinite().all()
    assert not compiled


def test_number_of_variants_is_small() -> None:
    """Each variant uses memory, and is compiled when a server starts on a new machine."""
    assert 0 < warmed() < 200
    assert warm_up(MODEL, DEVICE) == 0
