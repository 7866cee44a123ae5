"""Paged attention on a GPU: dtypes, head dims, block sizes and cache layouts against fp64, and CUDA graphs."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.paged_attention.paged_attention import paged_attention, paged_attention_triton

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Lengths:
    contexts: tuple[int, ...]
    queries: tuple[int, ...]


FAR_APART = Lengths((1, 3, 127, 129, 4097, 16, 17, 20000), (1,) * 8)
ONE_LONG = Lengths((33333,), (1,))
MANY = Lengths(tuple(range(1, 600, 3)), (1,) * 200)
A_FEW_EACH = Lengths((100, 2000, 5, 700), (4, 3, 2, 1))
MIXED = Lengths((100, 3000, 1, 129, 4097, 777), (100, 1, 1, 33, 1024, 3))
PROMPTS = Lengths((1024, 1024), (1024, 1024))


@dataclass(frozen=True)
class Shape:
    lengths: Lengths
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    layout: str = "NHD"
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None

    def __str__(self) -> str:
        return "-".join(str(one) for one in (sum(self.lengths.queries), *list(vars(self).values())[1:]))


SHAPES = [
    *(Shape(lengths) for lengths in (FAR_APART, ONE_LONG, MANY, A_FEW_EACH, MIXED, PROMPTS)),
    *(Shape(lengths, dtype=torch.float16) for lengths in (FAR_APART, MIXED)),
    *(Shape(lengths, window=100) for lengths in (FAR_APART, A_FEW_EACH, MIXED)),
    *(Shape(MIXED, block_size=size, layout="HND") for size in (16, 32, 64, 128)),
    *(Shape(MIXED, block_size=size) for size in (32, 64, 128)),
    *(Shape(MIXED, head_dim=dim) for dim in (64, 80, 256)),
    *(Shape(MIXED, heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((4, 4), (16, 1), (14, 2))),
    Shape(A_FEW_EACH, heads=16, kv_heads=1),
    Shape(A_FEW_EACH, heads=16, kv_heads=1, head_dim=256),
]


@dataclass
class Batch:
    """Blocks are scattered over the cache, and unused slots are NaN."""

    shape: Shape
    q: Tensor
    cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    def arguments(self) -> dict[str, Any]:
        key_cache, value_cache = self.cache[..., : self.shape.head_dim], self.cache[..., self.shape.head_dim :]
        return {
            "q": self.q,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": self.block_tables,
            "context_lens": self.context_lens,
            "query_starts": self.query_starts,
            "max_query_len": max(self.shape.lengths.queries),
            "max_context_len": max(self.shape.lengths.contexts),
            "window": self.shape.window,
            "out": torch.full_like(self.q, torch.nan),
        }

    def exact(self) -> Tensor:
        shape = self.shape
        outputs = []
        for seq, (context, own) in enumerate(
            zip(shape.lengths.contexts, torch.split(self.q, list(shape.lengths.queries)), strict=True)
        ):
            blocks = self.block_tables[seq, : -(-context // shape.block_size)]
            keys_values = self.cache[blocks].flatten(0, 1)[:context].double()
            k, v = (
                one.repeat_interleave(shape.heads // shape.kv_heads, 1) for one in torch.split(keys_values, shape.head_dim, -1)
            )
            positions = torch.arange(context - len(own), context, device=self.q.device)[:, None]
            keys = torch.arange(context, device=self.q.device)
            seen = (keys <= positions) & (keys > positions - (shape.window or context))
            scores = torch.einsum("qhd,khd->hqk", own.double(), k) * shape.head_dim**-0.5
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
        return torch.cat(outputs)


def batch(shape: Shape, device: str = "cuda") -> Batch:
    lengths, size = shape.lengths, shape.block_size
    needed = [-(-context // size) for context in lengths.contexts]
    blocks = sum(needed) + 5
    inner = (shape.kv_heads, size) if shape.layout == "HND" else (size, shape.kv_heads)
    cache = torch.full((blocks, *inner, 2 * shape.head_dim), torch.nan, dtype=shape.dtype, device=device)
    cache = cache.transpose(1, 2) if shape.layout == "HND" else cache
    block_tables = torch.full((len(needed), max(needed) + 1), 2**30, dtype=torch.int32, device=device)
    if device != "meta":
        order = torch.randperm(blocks, device=device).int()
        for seq, own in enumerate(torch.split(order[: sum(needed)], needed)):
            block_tables[seq, : len(own)] = own
            keys = torch.arange(lengths.contexts[seq], device=device)
            cache[own[keys // size], keys % size] = torch.randn(
                len(keys), shape.kv_heads, 2 * shape.head_dim, device=device, dtype=shape.dtype
            )
    q = torch.randn(sum(lengths.queries), shape.heads, shape.head_dim, device=device, dtype=shape.dtype)
    context_lens = torch.tensor(lengths.contexts, dtype=torch.int32, device=device)
    query_starts = torch.tensor([0, *accumulate(lengths.queries)], dtype=torch.int32, device=device)
    return Batch(shape, q, cache, block_tables, context_lens, query_starts)


def distance(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_fp64(shape: Shape) -> None:
    case = batch(shape)
    exact = case.exact()
    result = paged_attention(**case.arguments())
    assert distance(result, exact) < TOLERANCES[shape.dtype]
    rows = (result.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert rows.max() < 4 * TOLERANCES[shape.dtype]  # a wrong row would not show in the norm over all rows


def test_result_is_deterministic() -> None:
    arguments = batch(Shape(FAR_APART)).arguments()
    first = paged_attention(**arguments).clone()
    for _ in range(20):
        assert torch.equal(paged_attention(**arguments), first)


@pytest.mark.parametrize("lengths", [FAR_APART, MIXED], ids=["decode", "mixed"])
def test_cuda_graph_replays_for_other_lengths(lengths: Lengths) -> None:
    case = batch(Shape(lengths))
    arguments = case.arguments()
    graph = torch.cuda.CUDAGraph()
    paged_attention(**arguments)
    with torch.cuda.graph(graph):
        result = paged_attention(**arguments)
    shorter = Lengths(
        tuple(max(context - 60, own) for context, own in zip(lengths.contexts, lengths.queries, strict=True)), lengths.queries
    )
    case.shape = replace(case.shape, lengths=shorter)
    case.context_lens.copy_(torch.tensor(shorter.contexts))
    case.q.normal_()
    result.fill_(torch.nan)
    graph.replay()
    assert distance(result, case.exact()) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("usual", [None, 1, 5])
@pytest.mark.parametrize("tokens", [16, 512])
def test_cuda_graph_replays_for_other_batches(tokens: int, usual: int | None) -> None:
    """Captured as vLLM does for steps that mix prompts and decodes: with the maximum number of requests, of any lengths."""
    longest = Shape(Lengths((4096,) * 8, (tokens // 8,) * 8), head_dim=64, block_size=128)
    static = batch(longest)
    bounds = {"max_query_len": tokens, "max_context_len": 16384, "usual_query_len": usual}
    arguments = static.arguments() | {"scale": 64**-0.5, "window": 0} | bounds
    graph = torch.cuda.CUDAGraph()
    paged_attention_triton(**arguments)
    with torch.cuda.graph(graph):
        paged_attention_triton(**arguments)
    decodes = Lengths((5, 129, 4000, 1, 700, 3, 0, 0), (1, 1, 1, 1, 1, 1, 0, 0))
    one_prompt = Lengths((0, tokens, 0, 0, 0, 0, 0, 0), (0, tokens, 0, 0, 0, 0, 0, 0))
    mixed = Lengths((4096, 77, tokens - 9 + 300, 2, 5, 0, 0, 0), (1, 1, tokens - 9, 2, 5, 0, 0, 0))
    for lengths in (decodes, one_prompt, mixed, decodes):
        case = batch(replace(longest, lengths=lengths))
        used = len(case.q)
        static.cache[: len(case.cache)].copy_(case.cache)
        static.block_tables[:, : case.block_tables.shape[1]].copy_(case.block_tables)
        static.context_lens.copy_(case.context_lens)
        static.query_starts.copy_(case.query_starts)
        static.q[:used].copy_(case.q)
        static.q[used:] = torch.nan
        arguments["out"].fill_(3)
        graph.replay()
        assert distance(arguments["out"][:used], case.exact()) < TOLERANCES[torch.bfloat16]
        assert (arguments["out"][used:] == 3).all()


def test_streams_and_graphs_have_separate_counters() -> None:
    """The last program to arrive at a counter merges a sequence. Concurrent launches must not share counters."""
    case = batch(Shape(FAR_APART))
    arguments = case.arguments()
    expected = paged_attention(**arguments).clone()
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured = paged_attention(**arguments)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(aside):
            elsewhere = paged_attention(**arguments)
        graph.replay()
        here = paged_attention(**arguments)
        torch.cuda.synchronize()
        for result in (captured, elsewhere, here):
            assert torch.equal(result, expected)


def test_padded_batch_leaves_other_rows_unchanged() -> None:
    """Padding as vLLM does for a CUDA graph: sequences without queries and context, rows without a sequence."""
    case = batch(Shape(Lengths((100, 70, 0, 0), (1, 1, 0, 0))))
    arguments = case.arguments()
    padded = torch.full((4, *case.q.shape[1:]), 3.0, device="cuda", dtype=case.q.dtype)
    q = torch.cat([case.q, torch.full_like(case.q, torch.nan)])
    paged_attention(**(arguments | {"q": q, "out": padded}))
    assert distance(padded[:2], case.exact()) < TOLERANCES[torch.bfloat16]
    assert (padded[2:] == 3).all()


def test_float32_is_rejected() -> None:
    arguments = batch(Shape(A_FEW_EACH, dtype=torch.float32)).arguments()
    with pytest.raises(ValueError, match="bfloat16 and float16, and float32 on a CPU"):
        paged_attention(**arguments)
