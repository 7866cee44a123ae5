"""Compute time of a layer on an invented GPU with round figures, by worked numbers.

Matrix products run at 1e12 x 0.8 x 0.5 = 4e11 FLOP/s in bf16, kernels stream at 1e11 x 0.65 = 6.5e10 B/s, and 4 microseconds
pass between two kernels. A GPU has 384 tokens of sequences of 96 and half of each matrix.
"""

from dataclasses import replace

import pytest

from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.catalogue.software import program
from strata.planner.step import compute
from strata.planner.step.compute import Cut, LayerTime
from strata.planner.step.flops import attention_flops, forward_flops
from strata.planner.step.stages import layer_times
from strata.planner.step.tiles import filled
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Gpu

GPU = Gpu(
    name="round",
    device="",
    flops={"bf16": 1e12, "fp32": 2e11, "fp8": 2e12},
    memory=80e9,
    bandwidth=1e11,
    link=1e10,
    domain=8,
    reachable=0.8,
    sustained=0.5,
    multicast=False,
    pcie=1e9,
    dollars_per_hour=2.0,
    watts=500,
)
SHAPE = Shape("small", layers=5, hidden=64, heads=16, kv_heads=4, head_dim=6, ffn=160, vocab=1000, context=128)
SPARSE = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36, shared_ffn=20, dense_layers=1))
CUT = Cut(tokens=384, sequence=96, tensor=2, split=1, expert=1, precision="bf16")
CORE, MEGATRON, STRATA = program("megatron-core"), program("megatron-2022"), program("strata")
RATE, STREAM, LAUNCH = 4e11, 6.5e10, 4e-6


def share(rows: float, columns: float, inner: float) -> float:
    """Tiles of 128 x 256 on 132 multiprocessors: half a wave is lost, and 128 columns' worth of time for each tile."""
    tiles = max(rows / 128, 1) * max(columns / 256, 1)
    return tiles / (tiles + 66) * inner / (inner + 128)


def product(rows: float, columns: float, inner: float, rate: float = RATE) -> float:
    return 2 * rows * columns * inner / (rate * share(rows, columns, inner)) + LAUNCH


def weight(rows: float, columns: float, inner: float, rate: float = RATE) -> float:
    """The gradient of [inner, columns] sums over rows."""
    return 2 * rows * columns * inner / (rate * share(inner, columns, rows)) + LAUNCH


def worksheet(cut: Cut = CUT) -> Worksheet:
    found = Worksheet("test")
    compute.rates(GPU, cut.precision, found)
    return found


# ---------------------------------------------------------------- rates


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "expected"),
    [
        (256, 512, 384, 4 / 70 * 384 / 512),  # 2 x 2 tiles
        (64, 100, 128, 1 / 67 / 2),  # never less than one tile
        (128 * 66, 256, 128 * 99, 0.5 * 0.99),
        (384, 128, 128, 3 / 69 / 2),
    ],
)
def test_share_of_a_gpu_that_a_product_fills(rows: float, columns: float, inner: float, expected: float) -> None:
    assert filled(rows, columns, inner) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("precision", "matrix_rate", "attention_peak"),
    [("bf16", 4e11, 1e12), ("fp32", 0.8e11, 2e11), ("fp8", 2e12 * 0.4 * 0.9, 1e12)],  # attention is not done in FP8
)
def test_rates(precision: str, matrix_rate: float, attention_peak: float) -> None:
    found = worksheet(replace(CUT, precision=precision))  # type: ignore[arg-type]
    assert found["matrix_rate"] == pytest.approx(matrix_rate)
    assert found["attention_peak"] == attention_peak
    assert found["memory_rate"] == pytest.approx(6.5e10)
    assert found["launch"] == 4e-6


def test_a_precision_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="round does not compute in fp16"):
        compute.rates(GPU, "fp16", Worksheet("test"))


# ---------------------------------------------------------------- attention


def test_flash_attention() -> None:
    """12 + 2 x 2 key heads' worth of 6 columns; 8 heads of 6 + 6; positions pass 8 x 24 / 64 = 3 numbers per hidden number."""
    found = compute.attention(SHAPE, CUT, CORE, worksheet())
    flops = 384 * 96 * 8 * 12  # two products of two operations each, of which half is masked
    assert found.products == pytest.approx(product(384, 72, 64) + product(384, 64, 48))
    assert found.weight == pytest.approx(weight(384, 72, 64) + weight(384, 64, 48))
    assert found.core == pytest.approx(flops / 6e11 + LAUNCH)
    assert found.core_backward == pytest.approx(flops * 2.5 / 4.8e11 + 2 * LAUNCH)
    assert found.stream == pytest.approx(384 * 64 * (10 + 12) / STREAM + 3 * LAUNCH)
    assert found.stream_backward == pytest.approx(384 * 64 * (14 + 18) / STREAM + 4 * LAUNCH)


def test_streams_are_split_by_sequence_parallelism_except_between_products() -> None:
    found = compute.attention(SHAPE, replace(CUT, split=2), CORE, worksheet())
    assert found.stream == pytest.approx(384 * 64 * (5 + 12) / STREAM + 3 * LAUNCH)
    assert found.stream_backward == pytest.approx(384 * 64 * (7 + 18) / STREAM + 4 * LAUNCH)


def test_key_heads_are_replicated_on_more_gpus_than_there_are() -> None:
    found = compute.attention(SHAPE, replace(CUT, tensor=8), CORE, worksheet())
    assert found.products == pytest.approx(product(384, (16 + 16) * 6 / 8, 64) + product(384, 64, 12))


@pytest.mark.parametrize(
    ("head_dim", "score_s"),
    [(6, 2 / 6.5e10), (8, 16 / 4e11)],  # bound by writing two bytes, and by 2 x 8 operations
)
@pytest.mark.parametrize(("dropout", "dropped"), [(True, 5), (False, 0)])
def test_unfused_attention(head_dim: int, score_s: float, dropout: bool, dropped: float) -> None:
    software = replace(MEGATRON, dropout=dropout)
    found = compute.attention(replace(SHAPE, head_dim=head_dim), CUT, software, worksheet())
    scores = 384 * 96 * 8
    assert found.core == pytest.approx(scores * (2 * score_s + (3 + dropped) / STREAM) + 4 * LAUNCH)
    assert found.core_backward == pytest.approx(scores * (4 * score_s + (6 + dropped) / STREAM) + 6 * LAUNCH)
    inner = 8 * 4 * head_dim / 64
    assert found.stream == pytest.approx(384 * 64 * (10 + bool(dropped) + 4 * inner) / STREAM + 3 * LAUNCH)
    assert found.stream_backward == pytest.approx(384 * 64 * (14 + bool(dropped) + 6 * inner) / STREAM + 4 * LAUNCH)


@pytest.mark.parametrize("query_rank", [17, 0])
def test_latent_attention(query_rank: int) -> None:
    latent = Latent(query_rank=query_rank, kv_rank=12, plain_dim=7, rotary_dim=5, value_dim=9)
    found = compute.attention(replace(SHAPE, latent=latent), CUT, CORE, worksheet())
    queries = [(17, 64), (96, 17)] if query_rank else [(96, 64)]
    products = [*queries, (17, 64), (128, 12), (64, 72)]
    assert found.products == pytest.approx(sum(product(384, *each) for each in products))
    assert found.weight == pytest.approx(sum(weight(384, *each) for each in products))
    assert found.core == pytest.approx(384 * 96 * 8 * (12 + 9) / 6e11 + LAUNCH)
    assert found.stream == pytest.approx(384 * 64 * (10 + 4 * 8 * (36 + 9) / 64) / STREAM + 3 * LAUNCH)


# ---------------------------------------------------------------- feed-forward blocks and head


@pytest.mark.parametrize(("gated", "columns", "inner"), [(True, 160, 120), (False, 80, 80)])
def test_feed_forward(gated: bool, columns: int, inner: int) -> None:
    found = compute.feed_forward(replace(SHAPE, gated=gated), CUT, CORE, worksheet())
    assert found.products == pytest.approx(product(384, columns, 64) + product(384, 64, 80))
    assert found.weight == pytest.approx(weight(384, columns, 64) + weight(384, 64, 80))
    assert (found.core, found.core_backward) == (0, 0)
    assert found.stream == pytest.approx(384 * (64 * 10 + 4 * inner) / STREAM + 3 * LAUNCH)
    assert found.stream_backward == pytest.approx(384 * (64 * 14 + 6 * inner) / STREAM + 4 * LAUNCH)


def test_fp32_activations_take_four_bytes() -> None:
    cut = replace(CUT, precision="fp32")
    found = compute.feed_forward(SHAPE, cut, CORE, worksheet(cut))
    assert found.products == pytest.approx(product(384, 160, 64, 0.8e11) + product(384, 64, 80, 0.8e11))
    assert found.stream == pytest.approx(384 * (64 * 20 + 8 * 120) / STREAM + 3 * LAUNCH)


def grouped(chosen: float, columns: float, inner: float, experts: float) -> float:
    """A tile of an expert is never shorter than 128 rows, and a product never faster than its weights are read."""
    rows = chosen / experts
    seconds = 2 * chosen * columns * inner * max(1, 128 / rows) / (RATE * share(chosen, columns, inner)) + LAUNCH
    return max(seconds, experts * columns * inner * 2 / STREAM)


@pytest.mark.parametrize(("gated", "gates"), [(True, 2), (False, 1)])
@pytest.mark.parametrize(("expert", "tokens"), [(1, 384), (5, 384), (1, 4)])
def test_mixture_of_experts(gated: bool, gates: int, expert: int, tokens: int) -> None:
    """A GPU's experts get a tenth more than three copies of its tokens. They are 18 wide, and the shared one 10."""
    cut = replace(CUT, expert=expert, tokens=tokens)
    found = compute.mixture(replace(SPARSE, gated=gated), cut, CORE, worksheet())
    chosen, experts = tokens * 3.3, 10 / expert
    routed = grouped(chosen, 18 * gates, 64, experts) + grouped(chosen, 64, 18, experts)
    common = [(10, 64), (10 * gates, 64), (64, 10)]
    assert found.products == pytest.approx(routed + sum(product(tokens, *each) for each in common))
    assert found.weight == pytest.approx(routed + sum(weight(tokens, *each) for each in common))
    inner = (gates + 1) / 2 * (36 * 3 + 20) / 2
    assert found.stream == pytest.approx(tokens * (64 * (10 + 4 * 6) + 4 * inner) / STREAM + 3 * LAUNCH)
    assert found.stream_backward == pytest.approx(tokens * (64 * (14 + 6 * 6) + 6 * inner) / STREAM + 4 * LAUNCH)


def test_experts_wait_for_their_weights_on_a_slow_memory() -> None:
    """Two bytes for each weight of ten experts, 64 x 36 and 18 x 64 on one of two GPUs, at 6.5e6 B/s."""
    slow = Worksheet("test")
    compute.rates(replace(GPU, bandwidth=1e7), "bf16", slow)
    found = compute.mixture(SPARSE, CUT, CORE, slow)
    reading = (10 * 36 * 64 * 2 + 10 * 64 * 18 * 2) / 6.5e6
    assert found.products == pytest.approx(reading + product(384, 10, 64) + product(384, 20, 64) + product(384, 64, 10))


def test_head() -> None:
    """500 of 1,000 columns. A fused loss passes the logits three times; else nine passes in fp32 forwards and three back."""
    whole = compute.head(SHAPE, CUT, CORE, worksheet())
    assert whole.products == pytest.approx(product(384, 500, 64))
    assert whole.weight == pytest.approx(weight(384, 500, 64))
    assert whole.stream == pytest.approx(384 * 500 * 38 / STREAM + 6 * LAUNCH)
    assert whole.stream_backward == pytest.approx(384 * 500 * 14 / STREAM + 2 * LAUNCH)
    fused = compute.head(SHAPE, CUT, STRATA, worksheet())
    assert fused.stream == pytest.approx(384 * 500 * 6 / STREAM + LAUNCH)
    assert fused.stream_backward == 0


def test_layers_are_attention_and_a_block() -> None:
    found = layer_times(SPARSE, GPU, CORE, CUT, Worksheet("test"))
    around = compute.attention(SPARSE, CUT, CORE, worksheet())
    assert found.dense == around + compute.feed_forward(SPARSE, CUT, CORE, worksheet())
    assert found.sparse == around + compute.mixture(SPARSE, CUT, CORE, worksheet())
    assert found.head == compute.head(SPARSE, CUT, CORE, worksheet())
    assert layer_times(SHAPE, GPU, CORE, CUT, Worksheet("test")).sparse == around  # no mixture
    assert SPARSE.experts
    all_sparse = replace(SPARSE, experts=replace(SPARSE.experts, dense_layers=0))
    assert layer_times(all_sparse, GPU, CORE, CUT, Worksheet("test")).dense == around


def test_sums_and_multiples_of_layer_times() -> None:
    one, two = LayerTime(1, 2, 3, 4, 5, 6), LayerTime(10, 20, 30, 40, 50, 60)
    assert one + two == LayerTime(11, 22, 33, 44, 55, 66)
    assert one.times(3) == LayerTime(3, 6, 9, 12, 15, 18)
    assert one.forward == 1 + 3 + 5
    assert one.backward == 1 + 4 + 6
    assert LayerTime() == LayerTime(0, 0, 0, 0, 0, 0)


# ---------------------------------------------------------------- FLOPs


def test_flops_of_a_token() -> None:
    """Two for each parameter of a product, and attention's two products over the whole sequence, masked or not."""
    assert attention_flops(SHAPE, 96) == 2 * 96 * 16 * 12
    matrices = 5 * (64 * 144 + 96 * 64 + 3 * 64 * 160) + 64_000
    assert forward_flops(SHAPE, 96) == 2 * matrices + 5 * 36_864
    latent = replace(SHAPE, latent=Latent(query_rank=17, kv_rank=12, plain_dim=7, rotary_dim=5, value_dim=9))
    assert attention_flops(latent, 96) == 2 * 96 * 16 * (7 + 5 + 9)
