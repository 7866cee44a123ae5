"""Activations of one layer, part by part, by worked numbers.

A micro-batch of 3 sequences of 96 tokens in a ring of 2 GPUs is 144 tokens on one GPU. With tensor parallelism 2 a GPU has 48
numbers of a token's queries, 24 of its keys and values and 80 of its feed-forward block; 4 x 144 x 8 bytes are flash attention's
statistics. With sequence parallelism it has 72 tokens between the matrices.
"""

from dataclasses import replace

import pytest

from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.catalogue.software import program
from strata.planner.layout import Layout
from strata.planner.memory.activations import EAGER, FSDP, OWN, UNFUSED, Keeping, keeping_of, layer_parts

FLASH = Keeping("flash", "megatron")
SHAPE = Shape("small", layers=5, hidden=64, heads=16, kv_heads=4, head_dim=6, ffn=160, vocab=1000, context=128)
SPARSE = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36, shared_ffn=20))
UNSHARED = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36))
LATENT = replace(SHAPE, latent=Latent(query_rank=17, kv_rank=12, plain_dim=7, rotary_dim=5, value_dim=9))
LAYOUT = Layout(micro_batch=3, context=2, tensor=2)
SPLIT = replace(LAYOUT, sequence_parallel=True)
STATISTICS = 4 * 144 * 16 / 2


def parts(shape: Shape, layout: Layout, keeping: Keeping) -> tuple[float, ...]:
    found = layer_parts(shape, layout, keeping, sparse=shape.experts is not None, sequence=96)
    assert found.total == sum((found.norms, found.projections, found.core, found.feed_forward, found.residual))
    return found.norms, found.projections, found.core, found.feed_forward, found.residual


@pytest.mark.parametrize(
    ("layout", "keeping", "expected"),
    [
        # Flash: gate, up and product of a SwiGLU are saved, the product as a matrix's input.
        (
            LAYOUT,
            FLASH,
            (2 * 144 * 64 * 2, 144 * 64 * 2 + 144 * 48 * 2, 144 * 72 * 2 + STATISTICS, 144 * 64 * 2 + 144 * 80 * 6, 0),
        ),
        (
            replace(SPLIT, precision="fp8"),  # inputs of products take one byte
            FLASH,
            (2 * 72 * 64 * 2, 72 * 64 + 144 * 48, 144 * 72 * 2 + STATISTICS, 72 * 64 + 144 * 80 * (4 + 1), 0),
        ),
        (
            replace(LAYOUT, recompute="selective"),
            FLASH,
            (2 * 144 * 64 * 2, 144 * 64 * 2 + 144 * 48 * 2, 144 * 72 * 2, 144 * 64 * 2 + 144 * 80 * 6, 0),
        ),
        # Unfused: the activated gate too, softmax, its dropout's output and mask, and masks of the residual stream.
        (
            replace(SPLIT, precision="fp32"),
            UNFUSED,
            (
                2 * 72 * 64 * 4,
                72 * 64 * 4 + 144 * 48 * 4,
                144 * 72 * 4 + (4 + 4 + 1) * 144 * 96 * 8,
                72 * 64 * 4 + 144 * 80 * 16,
                2 * 72 * 64,
            ),
        ),
        (
            replace(LAYOUT, recompute="selective", precision="fp16"),
            UNFUSED,
            (
                2 * 144 * 64 * 2,
                144 * 64 * 2 + 144 * 48 * 2,
                144 * 72 * 2,
                144 * 64 * 2 + 144 * 80 * 8,
                2 * 144 * 64,
            ),
        ),
        # Our kernels: a norm's input and root mean square; gate, up and product.
        (
            LAYOUT,
            OWN,
            (
                2 * 144 * (64 * 2 + 4),
                144 * 64 * 2 + 144 * 48 * 2,
                144 * 72 * 2 + STATISTICS,
                144 * 64 * 2 + 3 * 144 * 80 * 2,
                0,
            ),
        ),
        # Plain torch: the norm's input in fp32 and its output; the activated gate.
        (
            SPLIT,
            EAGER,
            (
                2 * 72 * (64 * (4 + 2) + 4),
                72 * 64 * 2 + 144 * 48 * 2,
                144 * 72 * 2 + STATISTICS,
                72 * 64 * 2 + 4 * 144 * 80 * 2,
                0,
            ),
        ),
        # Results of products and the layer's input; DeepSpeed's tensor parallelism sums the other products in place.
        (
            replace(LAYOUT, recompute="selective"),
            OWN,
            (0, 144 * 72 * 2, 144 * 48 * 2 + STATISTICS, 2 * 144 * 80 * 2, 144 * 64 * 2),
        ),
        (
            replace(LAYOUT, recompute="selective", tensor=1),
            OWN,
            (0, 144 * 144 * 2 + 144 * 64 * 2, 144 * 96 * 2 + 2 * STATISTICS, 2 * 144 * 160 * 2 + 144 * 64 * 2, 144 * 64 * 2),
        ),
        (
            replace(SPLIT, recompute="selective"),
            FSDP,
            (
                0,
                (144 * 72 * 2 + 72 * 64 * 2) / 2,
                144 * 48 * 2 + STATISTICS,
                (2 * 144 * 80 * 2 + 72 * 64 * 2) / 2,
                72 * 64 * 2,
            ),
        ),
        (replace(SPLIT, recompute="full", precision="fp32"), OWN, (0, 0, 0, 0, 72 * 64 * 4)),
        (replace(LAYOUT, recompute="full"), UNFUSED, (0, 0, 0, 0, 144 * 64 * 2)),
    ],
)
def test_parts_of_a_dense_layer(layout: Layout, keeping: Keeping, expected: tuple[float, ...]) -> None:
    assert parts(SHAPE, layout, keeping) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("layout", "keeping", "feed_forward"),
    [
        # 432 copies of tokens go to experts of 36 / 2; the shared expert has 20 / 2.
        (
            SPLIT,
            FLASH,
            72 * (64 * 2 + 4 * 10) + 432 * (64 * 2 + 18 * 6) + 144 * 10 * 6,
        ),
        (
            replace(LAYOUT, precision="fp8"),
            FLASH,
            144 * (64 + 4 * 10) + 432 * (64 + 18 * 5) + 144 * 10 * 5,
        ),
        (
            LAYOUT,
            UNFUSED,
            144 * (64 * 2 + 4 * 10) + 432 * (64 * 2 + 18 * 8) + 432 * 64 * 2 + 144 * 10 * 8,
        ),
        (
            SPLIT,
            OWN,
            72 * (64 * 2 + 8 * 10) + 432 * (3 * 64 + 3 * 18) * 2 + 144 * (64 + 3 * 10) * 2,
        ),
        (
            LAYOUT,
            EAGER,
            144 * (64 * 2 + 8 * 10) + 432 * (3 * 64 + 4 * 18) * 2 + 144 * (64 + 4 * 10) * 2,
        ),
        (
            replace(LAYOUT, recompute="selective"),
            OWN,
            144 * 10 * 2 + 2 * 432 * 18 * 2 + 2 * 144 * 10 * 2,
        ),
        (
            replace(SPLIT, recompute="selective"),
            FSDP,
            (72 * 10 * 2 + 2 * 432 * 18 * 2 + 432 * 64 * 2 + 2 * 144 * 10 * 2 + 72 * 64 * 2) / 2,
        ),
    ],
)
def test_feed_forward_of_a_layer_with_experts(layout: Layout, keeping: Keeping, feed_forward: float) -> None:
    dense, sparse = parts(SHAPE, layout, keeping), parts(SPARSE, layout, keeping)
    assert sparse[3] == pytest.approx(feed_forward)
    assert sparse[:3] == dense[:3] and sparse[4] == dense[4]  # attention is the same


@pytest.mark.parametrize(
    ("layout", "keeping", "feed_forward"),
    [
        (LAYOUT, OWN, 144 * (64 * 2 + 8 * 10) + 432 * (3 * 64 + 3 * 18) * 2),
        (replace(LAYOUT, recompute="selective"), OWN, 144 * 10 * 2 + 2 * 432 * 18 * 2),
        (replace(LAYOUT, recompute="selective"), FSDP, (144 * 10 * 2 + 2 * 432 * 18 * 2 + 432 * 64 * 2) / 2),
        # The fullest GPU of two gets a quarter more than its share of the copies: 540.
        (replace(LAYOUT, expert=2, data=2), OWN, 144 * (64 * 2 + 8 * 10) + 540 * (3 * 64 + 3 * 18) * 2),
    ],
)
def test_without_a_shared_expert(layout: Layout, keeping: Keeping, feed_forward: float) -> None:
    assert parts(UNSHARED, layout, keeping)[3] == pytest.approx(feed_forward)


# 16 heads of 7 + 5 are 96 numbers of queries on one of two GPUs, with 16 x 9 / 2 = 72 values; narrow: 2 x 17 + 2 x 12 + 5 = 63.
@pytest.mark.parametrize(
    ("layout", "keeping", "projections", "core"),
    [
        (SPLIT, FLASH, 72 * (64 + 63) * 2 + 144 * 72 * 2, 144 * (96 + 168) * 2 + STATISTICS),
        (SPLIT, OWN, 72 * (64 + 63) * 2 + 144 * 72 * 2, 144 * (96 + 168) * 2 + STATISTICS),
        (
            replace(SPLIT, recompute="selective"),
            OWN,
            144 * (96 + 168) * 2 + 72 * 63 * 2,
            144 * 72 * 2 + STATISTICS,
        ),
    ],
)
def test_latent_attention(layout: Layout, keeping: Keeping, projections: float, core: float) -> None:
    assert parts(LATENT, layout, keeping)[1:3] == pytest.approx((projections, core))


def test_a_gelu_saves_its_input_and_output() -> None:
    plain = replace(SHAPE, gated=False)
    assert parts(plain, LAYOUT, UNFUSED)[3] == 144 * 64 * 2 + 144 * 80 * 4
    assert parts(plain, replace(LAYOUT, precision="fp8"), FLASH)[3] == 144 * 64 + 144 * 80 * 3


def test_key_heads_are_replicated_beyond_their_number() -> None:
    """Ulysses over 4 GPUs leaves 72 tokens each; 4 key heads over tensor 2 are fewer than the 4 that Ulysses needs."""
    layout = Layout(micro_batch=3, sequence=4, tensor=2)
    assert parts(SHAPE, layout, FLASH)[2] == 72 * (48 + 2 * 4 * 6) * 2 + 4 * 72 * 8
    narrow = Layout(micro_batch=3, sequence=4)
    assert parts(SHAPE, replace(narrow, sequence=2), FLASH)[2] == 144 * (96 + 2 * 4 * 6) * 2 + 4 * 144 * 16


def test_sequences_have_the_context_length_by_default() -> None:
    assert layer_parts(SHAPE, Layout(), FLASH).norms == 2 * 128 * 64 * 2


def test_memory_model_of_each_program() -> None:
    assert keeping_of(program("megatron-2022")) == Keeping("unfused", "megatron")
    assert keeping_of(program("megatron-core")) == FLASH
    assert keeping_of(replace(program("megatron-core"), gradient_bytes=4)) == replace(FLASH, fp32_gradients=True)
    assert keeping_of(program("torch-fsdp")) == Keeping("flash", "fsdp", "half")
    assert keeping_of(program("strata")) == Keeping("own", "deepspeed", "streams")
    assert keeping_of(program("strata-eager")) == Keeping("eager", "deepspeed", "streams")
    assert keeping_of(program("strata-torch")) == Keeping("flash", "deepspeed", "streams")
    assert not any(keeping_of(program(name)).cpu for name in ("strata", "torch-fsdp", "megatron-core"))
