"""Paged attention: the CPU implementation and the interpreted Triton kernels against plain torch, for all kinds of batches."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.paged_attention.paged_attention import paged_attention, paged_attention_triton, reference

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton compiles instead of interpreting")


@dataclass
class Batch:
    """Arguments in call order. Blocks are scattered over the cache, and unused slots are NaN."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.key_cache, self.value_cache, self.block_tables, self.context_lens, self.query_starts

    def limits(self) -> tuple[int, int]:
        return max(self.query_starts.diff().tolist(), default=0), max(self.context_lens.tolist(), default=0)

    def attended(self, window: int | None = None, scale: float | None = None, out: Tensor | None = None) -> Tensor:
        queries, context = self.limits()
        return paged_attention(
            *self.arguments(), max_query_len=queries, max_context_len=context, window=window, scale=scale, out=out
        )

    def interpreted(self, window: int | None = None, scale: float | None = None) -> Tensor:
        out = torch.full_like(self.q, torch.nan)
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        paged_attention_triton(*self.arguments(), out, *self.limits(), scale, window or 0)
        return out

    def exact(self, window: int | None = None, scale: float | None = None) -> Tensor:
        k, v = (torch.nan_to_num(cache.double(), 0.0) for cache in (self.key_cache, self.value_cache))
        return reference(self.q.double(), k, v, *self.arguments()[3:], window=window, scale=scale)


def batch(
    contexts: list[int],
    queries: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
) -> Batch:
    needed = [-(-context // block_size) for context in contexts]
    blocks = sum(needed) + 3
    shape = (blocks, kv_heads, block_size, 2 * head_dim) if layout == "HND" else (blocks, block_size, kv_heads, 2 * head_dim)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    cache = cache.transpose(1, 2) if layout == "HND" else cache  # keys and values of a head are adjacent, as in vLLM
    key_cache, value_cache = cache[..., :head_dim], cache[..., head_dim:]
    order = torch.split(torch.randperm(blocks, dtype=torch.int32), [*needed, 3])
    block_tables = torch.full((len(contexts), max(needed, default=0) + 1), blocks + 1000, dtype=torch.int32)
    for seq, own in enumerate(order[:-1]):
        block_tables[seq, : len(own)] = own
        for key in range(contexts[seq]):
            cache[own[key // block_size], key % block_size] = torch.randn(kv_heads, 2 * head_dim).to(dtype)
    q = torch.randn(sum(queries), heads, head_dim).to(dtype)
    starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
    return Batch(q, key_cache, value_cache, block_tables, torch.tensor(contexts, dtype=torch.int32), starts)


def distance(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


BATCHES = {
    "short": ([40, 3, 0, 64, 17], [1, 1, 0, 3, 1]),
    "lengths far apart": ([1, 3, 127, 129, 16], [1] * 5),
    "a few queries each": ([40, 70, 5, 3], [4, 3, 5, 1]),
    "prompts alone": ([40, 40], [40, 40]),
    "prompts, prompt chunks and decodes": ([70, 60, 9, 1], [40, 1, 9, 1]),
    "no queries, no context": ([50, 0, 17], [0, 0, 1]),
}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_triton_kernels_agree_with_plain_torch(lengths: tuple[list[int], list[int]], window: int | None) -> None:
    case = batch(*lengths)
    assert distance(case.interpreted(window), case.exact(window)) < 1e-5


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_cpu_agrees_with_plain_torch(lengths: tuple[list[int], list[int]], window: int | None) -> None:
    case = batch(*lengths)
    assert distance(case.attended(window), case.exact(window)) < 1e-5


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("queries", [[1] * 6, [0, 0, 24, 0, 0, 0], [1, 1, 17, 3, 0, 0], [8, 9, 1, 2, 1, 3]], ids=str)
@pytest.mark.parametrize(("tokens", "usual"), [(24, None), (48, None), (24, 1), (24, 9), (48, 9)])
def test_one_launch_configuration_handles_any_batch_of_that_size(queries: list[int], tokens: int, usual: int | None) -> None:
    """As in CUDA graph replay: shapes are those of the capture, and one request may have all the tokens. Two launches share the
    batch, except for small captures that do not know the usual number of queries."""
    case = batch([own and own + 5 * seq for seq, own in enumerate(queries)], queries)
    used = len(case.q)
    q = torch.cat([case.q, torch.full((tokens - used, *case.q.shape[1:]), torch.nan)])
    out = torch.full_like(q, 3.0)
    paged_attention_triton(q, *case.arguments()[1:], out, tokens, 4096, case.q.shape[-1] ** -0.5, 0, usual_query_len=usual)
    assert distance(out[:used], case.exact()) < 1e-5
    assert (out[used:] == 3).all()


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    "contexts",
    [[300, 30, 0, 70], [20, 0, 0, 0, 0, 30], [400] * 5, [600]],
    ids=["parts of one sequence", "fewer tiles than sequences", "cut inside sequences", "one sequence"],
)
def test_divisions_into_chunks(contexts: list[int]) -> None:
    """On eight programs of one KV head, with a bound of the context as in a graph."""
    case = batch(contexts, [min(context, 1) for context in contexts], heads=2, kv_heads=1)
    out = torch.full_like(case.q, torch.nan)
    paged_attention_triton(*case.arguments(), out, 1, 4096, case.q.shape[-1] ** -0.5, 0)
    assert distance(out, case.exact()) < 1e-5


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("layout", "block_size"), [("HND", 16), ("NHD", 32), ("HND", 64), ("NHD", 128)])
def test_cache_layouts_and_block_sizes(layout: str, block_size: int) -> None:
    case = batch([1, 130, 40], [1, 1, 34], kv_heads=1, block_size=block_size, layout=layout)
    assert distance(case.interpreted(), case.exact()) < 1e-5
    assert distance(case.attended(), case.exact()) < 1e-5


@interpreted
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (7, 1), (16, 1), (20, 1)])
def test_group_sizes(heads: int, kv_heads: int) -> None:
    case = batch([33, 3], [1, 3], heads, kv_heads)
    assert distance(case.interpreted(), case.exact()) < 1e-5


@interpreted
@pytest.mark.parametrize("head_dim", [8, 40, 64])
def test_head_dims_are_padded(head_dim: int) -> None:
    case = batch([35, 33], [1, 33], heads=2, kv_heads=1, head_dim=head_dim)
    assert distance(case.interpreted(), case.exact()) < 1e-5


@interpreted
def test_half_precision() -> None:
    case = batch([40, 33], [1, 33], kv_heads=1, dtype=torch.float16)
    assert distance(case.interpreted(), case.exact()) < 2e-3
    assert distance(case.attended(), case.exact()) < 2e-3


@interpreted
def test_scores_that_differ_by_thousands() -> None:
    case = batch([40, 33], [1, 20], kv_heads=1)
    case.q *= 1000
    assert distance(case.interpreted(), case.exact()) < 1e-5
    assert distance(case.attended(), case.exact()) < 1e-5


@interpreted
def test_custom_scale() -> None:
    case = batch([40, 33], [1, 20], kv_heads=1)
    assert distance(case.interpreted(scale=0.7), case.exact(scale=0.7)) < 1e-5
    assert distance(case.attended(scale=0.7), case.exact(scale=0.7)) < 1e-5


@interpreted
def test_query_before_every_key_returns_zeros() -> None:
    case = batch([0, 2, 30], [1, 4, 1])
    for result in (case.interpreted(), case.attended()):
        assert torch.equal(result[:3], torch.zeros_like(result[:3]))
        assert distance(result, case.exact()) < 1e-5


def test_strided_queries_and_padded_output() -> None:
    case = batch([40, 33], [1, 20], kv_heads=1)
    exact = case.exact()
    packed = torch.cat([case.q, torch.randn_like(case.q)], dim=1)
    case.q = packed[:, : case.q.shape[1]]
    padded = torch.full((25, 6, 16), 5.0)
    out = padded[:21, 1:5]
    assert case.attended(out=out) is out
    assert distance(out, exact) < 1e-5
    assert (padded[21:] == 5).all() and (padded[:, 0] == 5).all() and (padded[:, 5] == 5).all()
    if not torch.cuda.is_available():
        assert distance(case.interpreted(), exact) < 1e-5


def test_empty_batch() -> None:
    case = batch([], [])
    assert case.attended().shape == (0, 4, 16)
    paged_attention_triton(*case.arguments(), case.q, 0, 0, 1.0, 0)


def test_opcheck() -> None:
    case = batch([30, 20], [1, 5])
    for window in (0, 8):
        torch.library.opcheck(
            torch.ops.strata.paged_attention, (*case.arguments(), torch.zeros_like(case.q), 5, 30, 0.25, window)
        )


def test_compiles_without_a_graph_break() -> None:
    case = batch([30, 20], [1, 5])

    def doubled(q: Tensor) -> Tensor:
        return paged_attention(q * 2, *case.arguments()[1:], max_query_len=5, max_context_len=30) + 1

    assert torch.equal(torch.compile(doubled, fullgraph=True, backend="aot_eager")(case.q), doubled(case.q))


def test_inputs_that_require_grad_are_rejected() -> None:
    case = batch([30], [1])
    case.q.requires_grad_()
    with pytest.raises(ValueError, match="no gradient"):
        case.attended()
    with torch.no_grad():
        assert not case.attended().requires_grad


def test_invalid_arguments_are_rejected() -> None:
    case = batch([30, 20], [1, 5])

    def rejected(match: str, **changes: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            replace(case, **changes).attended()

    rejected(r"got q \[6, 4, 8\]", q=case.q[..., :8])
    rejected("got 3 heads and 2 KV heads", q=case.q[:, :3])
    rejected("got torch.float16 with torch.float32", q=case.q.half())
    rejected("got torch.float64", q=case.q.double())
    rejected("stride 1", q=case.q.repeat_interleave(2, dim=2)[..., ::2])
    rejected(r"\[2\], \[1, 3\] and \[3\]", block_tables=case.block_tables[:1])
    rejected("int32, got torch.int32, torch.int64", context_lens=case.context_lens.long())
    wide = torch.zeros(1, 1, 512)
    rejected("up to 256, got 512", q=wide, key_cache=wide[None], value_cache=wide[None])
    with pytest.raises(ValueError, match="window of at least 1, the query's own key, got 0"):
        case.attended(window=0)
    with pytest.raises(ValueError, match="expects an `out` of q's shape"):
        case.attended(out=torch.empty(6, 4, 8))
