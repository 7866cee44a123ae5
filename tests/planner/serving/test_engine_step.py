"""Step time and memory of an inference engine on an invented GPU with round figures, by worked numbers.

Memory is read at 1e11 x 0.9 = 9e10 B/s and products run at 1e12 x 0.8 = 8e11 FLOP/s. A layer has 46,208 parameters.
"""

from dataclasses import replace
from typing import Any

import pytest

from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.serving.engine_step import Load, decode, describe, most, prefill
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Gpu

GPU = Gpu(
    name="round",
    device="",
    flops={"bf16": 1e12, "fp16": 5e11, "fp8": 2e12},
    memory=20e9,
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
SPARSE = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36, shared_ffn=20, dense_layers=2))
LATENT = replace(SHAPE, latent=Latent(query_rank=17, kv_rank=12, plain_dim=7, rotary_dim=5, value_dim=9))
COMMON = 5 * (15360 + 128 + 30720)
READ, COMPUTE = 9e10, 8e11


def engine(shape: Shape = SHAPE, tensor: int = 2, **more: Any) -> Worksheet:
    worksheet = Worksheet("test")
    describe(shape, GPU, worksheet, tensor, **more)
    return worksheet


def test_mean_context_of_a_load() -> None:
    assert Load(1, prompt=300, output=50).context == 325
    assert Load(1, prompt=300, output=50) == Load(1, 300, 50, cached=0.0, variation=1.0)


def test_an_engine_is_one_gpu_by_default() -> None:
    found = Worksheet("test")
    describe(SHAPE, GPU, found)
    assert (found["tensor"], found["bytes_per_weight"], found["bytes_per_value"], found["max_sequences"]) == (1, 2, 2, 1024)


# ---------------------------------------------------------------- an engine's figures


def test_a_dense_engine() -> None:
    found = engine()
    assert found["flops_per_token"] == 2 * COMMON / 2
    # per layer 8 passes of 64; positions of (16 + 4) x 6 twice and three of 160, halved by tensor parallelism
    assert found["elementwise_bytes"] == 2 * (8 * 5 * 64 + (2 * 5 * 120 + 3 * 800) / 2)
    assert found["weights_bytes"] == (COMMON * 2 + 128_000 * 2) / 2
    assert found["activation_bytes"] == 8192 * 2 * (4 * 64 + 3 * 160 / 2) + 1024 * 1000 * 4 / 2 + 1.5e9
    assert found["kv_space"] == pytest.approx(18e9 - found["weights_bytes"] - found["activation_bytes"])
    assert found["kv_bytes_per_token"] == 5 * 2 * 12 * 2
    assert found["prefill_pair_flops"] == found["decode_pair_flops"] == 2 * 5 * 8 * 12
    assert found["kernels_s"] == pytest.approx(50 * 3e-6)
    assert (found["memory_rate"], found["matrix_rate"], found["attention_rate"]) == pytest.approx((READ, COMPUTE, COMPUTE))
    assert (found["chunk"], found["max_sequences"]) == (8192, 1024)


def test_a_sparse_engine() -> None:
    """Three layers with ten experts of 6,912 parameters, a router of 640 and a shared expert of 3,840."""
    found = engine(SPARSE)
    common = 5 * (15360 + 128) + 2 * 30720 + 3 * (640 + 3840)
    assert found["common_weights"] == common
    assert found["routed_weights"] == 3 * 10 * 6912
    assert found["flops_per_token"] == pytest.approx(common + 3 * 3 * 6912)
    widths = 2 * 160 + 3 * (3 * 36 + 20)
    assert found["elementwise_bytes"] == 2 * (8 * 5 * 64 + 2 * 9 * 64 + (2 * 5 * 120 + 3 * widths) / 2)
    assert found["weights_bytes"] == ((common + 207_360) * 2 + 128_000 * 2) / 2
    assert found["kernels_s"] == pytest.approx((50 + 15) * 3e-6)


def test_a_latent_engine() -> None:
    found = engine(LATENT)
    assert found["kv_bytes_per_token"] == 5 * (12 + 5) * 2  # a full copy on every GPU
    assert found["prefill_pair_flops"] == 2 * 5 * 8 * (7 + 5 + 9)
    assert found["decode_pair_flops"] == 2 * 5 * 8 * (2 * 12 + 5)
    assert found["elementwise_bytes"] == 2 * (8 * 5 * 64 + (2 * 5 * 16 * 12 + 3 * 800) / 2)
    assert found["kernels_s"] == pytest.approx((50 + 30) * 3e-6)


def test_precisions() -> None:
    narrow = engine(precision="fp8", kv_precision="fp8", max_sequences=10)
    assert narrow["weights_bytes"] == (COMMON + 128_000 * 2) / 2  # tables stay in 16 bits
    assert narrow["kv_bytes_per_token"] == 5 * 2 * 12
    assert narrow["matrix_rate"] == pytest.approx(2e12 * 0.8 * 0.9)
    assert narrow["attention_rate"] == pytest.approx(COMPUTE)
    assert narrow["activation_bytes"] == 8192 * 2 * (4 * 64 + 240) + 10 * 1000 * 4 / 2 + 1.5e9
    half = engine(precision="fp16")
    assert (half["matrix_rate"], half["attention_rate"]) == pytest.approx((4e11, 4e11))
    assert engine(kv_precision="fp8")["weights_bytes"] == engine()["weights_bytes"]


def test_tied_tables_and_replicated_key_heads() -> None:
    assert engine(replace(SHAPE, tied=True))["table_weights"] == 64_000
    assert engine(tensor=8)["kv_bytes_per_token"] == 5 * 1 * 12 * 2


def test_engines_that_cannot_be_built() -> None:
    with pytest.raises(UserError, match="round does not compute in fp4"):
        engine(precision="fp4")
    with pytest.raises(UserError, match="tensor=16 exceeds the 8 round"):
        engine(tensor=16)
    with pytest.raises(UserError, match="tensor=3 does not divide the 16 heads"):
        engine(tensor=3)
    assert engine(tensor=8)["tensor"] == 8


# ---------------------------------------------------------------- prefill


def reading(batch: float, found: Worksheet) -> float:
    """Bytes of weights on one of two GPUs: random tokens leave (1 - 3/10)^batch of the experts out."""
    routed = found["routed_weights"] * (1 - 0.7**batch) if found["experts"] == 10 else found["routed_weights"]
    return ((found["common_weights"] + routed) * 2 + 2 * 64_000) / 2


@pytest.mark.parametrize("shape", [SHAPE, SPARSE])
@pytest.mark.parametrize(("prompt", "cached", "chunks"), [(400, 0.25, 1), (8192, 0.0, 1), (8193, 0.0, 2), (30_000, 0.5, 2)])
def test_prefill(shape: Shape, prompt: int, cached: float, chunks: int) -> None:
    found = engine(shape)
    seconds = prefill(prompt, cached, found)
    new = prompt * (1 - cached)
    matrix = new * found["flops_per_token"] / COMPUTE
    pairs = new * (prompt - new) + new * new / 2  # with the cached tokens, and with half of the new ones
    attention = pairs * 960 / COMPUTE
    elementwise = new * found["elementwise_bytes"] / READ
    sent = 2 * 1 / 2 * 64 * 2  # bytes of a token in an all-reduce between two GPUs
    wire = new * 2 * 5 * sent / 9e9
    assert found["prefill_work_s"] == pytest.approx(matrix + attention + elementwise + wire)
    assert found["chunks"] == chunks
    size = sent * min(new, 8192)
    all_reduce = chunks * 10 * min(8e-6 + size / 3e9, 40e-6 + size / 9e9)
    weights = chunks * reading(min(new, 8192), found) / READ
    host = chunks * (1e-3 + found["kernels_s"])
    assert seconds == pytest.approx(max(matrix, weights) + attention + elementwise + all_reduce + host)


def test_a_short_prompt_waits_for_the_weights() -> None:
    found = engine(SPARSE)
    prefill(3, 0.0, found)
    assert found["prefill_weights_s"] > found["prefill_matrix_s"]
    assert found["prefill_weights_s"] == pytest.approx(reading(3, found) / READ)


def test_one_gpu_has_nothing_to_reduce() -> None:
    found = engine(tensor=1)
    prefill(400, 0.0, found)
    assert found["prefill_wire_s"] == found["prefill_all_reduce_s"] == 0
    decode(8, 100, found)
    assert found["decode_all_reduce_s"] == 0


# ---------------------------------------------------------------- decode


@pytest.mark.parametrize("shape", [SHAPE, SPARSE, LATENT])
@pytest.mark.parametrize("batch", [1, 7, 64, 5000])
def test_decode(shape: Shape, batch: int) -> None:
    found = engine(shape)
    seconds = decode(batch, 100, found)
    assert found["weights_read"] == pytest.approx(reading(batch, found))
    # The head is a product of 64 x 1,000, half of it on each GPU.
    matrix = max(reading(batch, found) / READ, batch * (found["flops_per_token"] + 2 * 64_000 / 2) / COMPUTE)
    attention = batch * 100 * max(found["kv_bytes_per_token"] / READ, found["decode_pair_flops"] / COMPUTE)
    elementwise = batch * found["elementwise_bytes"] / READ
    all_reduce = 10 * min(8e-6 + 128 * batch / 3e9, 40e-6 + 128 * batch / 9e9)
    host = 1e-3 + batch * 5e-6
    gpu = matrix + attention + elementwise + all_reduce + found["kernels_s"] + host
    assert seconds == pytest.approx(max(gpu, 1.5e-3 + batch * 23e-6))


def test_attention_is_bound_by_compute_with_latents_and_by_the_cache_without() -> None:
    many = engine(replace(LATENT, heads=64, kv_heads=64))
    decode(8, 100, many)
    assert many["decode_attention_s"] == pytest.approx(8 * 100 * 2 * 5 * 32 * 29 / COMPUTE)
    plain = engine()
    decode(8, 100, plain)
    assert plain["decode_attention_s"] == pytest.approx(8 * 100 * 240 / READ)


def test_a_batch_is_at_least_one() -> None:
    found = engine()
    assert decode(0.2, 100, found) == decode(1, 100, found) < decode(1.5, 100, found)


# ---------------------------------------------------------------- the largest batch


def test_the_largest_batch_fits_the_cache_or_the_limit() -> None:
    load = Load(1, prompt=400, output=100)
    found = engine()
    prefill(400, 0.0, found)
    batch, tokens_per_s = most(load, found)
    assert batch == 1024  # of the engine's limit
    step = decode(1024, 450, Worksheet("alone", found))
    assert tokens_per_s == pytest.approx(100 / (found["prefill_work_s"] + 100 * step / 1024))
    small = engine()
    free = 240 * 500 * 7.9  # space of almost eight sequences
    small.given("kv_space", free)
    prefill(400, 0.0, small)
    assert most(load, small)[0] == 7


def test_a_sequence_that_just_fits() -> None:
    load = Load(1, prompt=400, output=100)
    found = engine()
    prefill(400, 0.0, found)
    needed = found["weights_bytes"] + found["activation_bytes"] + 240 * 500
    found.given("memory", needed / 0.9 * (1 + 1e-9))
    assert most(load, found)[0] == 1024
    found.given("memory", needed / 0.9 * (1 - 1e-9))
    with pytest.raises(UserError, match=r"one sequence of 500 tokens needs 1\.5 GB on each GPU, and 1\.5 GB are") as caught:
        most(load, found)
    assert "raise tensor above 2" in caught.value.fix
