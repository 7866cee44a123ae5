"""Collectives of a step: sizes, counts and placement, by worked numbers."""

from dataclasses import replace

import pytest

from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.catalogue.software import program
from strata.planner.collectives.cost import cost, links
from strata.planner.collectives.patterns import Place
from strata.planner.layout import Layout
from strata.planner.step import communication as talk
from strata.planner.step.communication import Exchange, Ground
from strata.platform.hardware import catalogue as hardware

LINKS = links(hardware.gpu("h100"), hardware.fabric("ndr-400"), launch=0.0)
GROUND = Ground(domain=8, gpus=32, links=LINKS)
SHAPE = Shape("small", layers=5, hidden=64, heads=16, kv_heads=4, head_dim=6, ffn=160, vocab=1000, context=128)
SPARSE = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36))
TOKENS, WIDTH = 384.0, 2


def facts(exchange: Exchange) -> tuple[str, str, float, float, Place]:
    return exchange.dimension, exchange.kind, exchange.size, exchange.times, exchange.place


@pytest.mark.parametrize(
    ("ranks", "stride", "place"),
    [
        (4, 1, Place(4)),
        (8, 1, Place(8)),
        (4, 2, Place(4)),
        (16, 1, Place(8, 2)),
        (16, 2, Place(4, 4, 2)),  # two such groups share each domain's cards
        (9, 2, Place(4, 3, 2)),
        (3, 3, Place(2, 2, 4)),
        (2, 8, Place(1, 2, 8)),
        (2, 16, Place(1, 2, 8)),
        (1, 1, Place(1)),
    ],
)
def test_placement_of_a_group(ranks: int, stride: int, place: Place) -> None:
    assert GROUND.place(ranks, stride) == place


def test_a_small_cluster_has_fewer_groups_on_its_cards() -> None:
    assert Ground(8, 6, LINKS).place(3, 4) == Place(2, 2, 3)
    assert Ground(8, 6, LINKS).exchange("pipeline", "send", 10.0, 1, 2, 9).place == Place(1, 2, 6)


@pytest.mark.parametrize(
    ("stride", "place"), [(1, Place(1)), (7, Place(1)), (8, Place(1, 2, 8)), (15, Place(1, 2, 8)), (16, Place(1, 3, 8))]
)
def test_placement_of_a_send(stride: int, place: Place) -> None:
    assert GROUND.exchange("pipeline", "send", 10.0, 1, 2, stride).place == place


@pytest.mark.parametrize(("ranks", "stride"), [(8, 1), (32, 1), (4, 8)])
def test_an_exchange_has_the_cost_of_its_place(ranks: int, stride: int) -> None:
    found = GROUND.exchange("data", "all_reduce", 3e9, 5, ranks, stride)
    expected = cost("all_reduce", 3e9, GROUND.place(ranks, stride), LINKS)
    assert (found.seconds, found.algorithm) == (expected.seconds, expected.algorithm)
    assert found.sent == expected.wire_bytes_inside + expected.wire_bytes_outside > 0
    assert expected.wire_bytes_outside > 0 or ranks == 8
    assert talk.total([found, replace(found, seconds=2.0, times=3)]) == 5 * found.seconds + 6
    assert talk.total(()) == 0


def test_tensor_parallelism() -> None:
    size = 384 * 64 * 2
    assert talk.tensor_exchanges(SHAPE, Layout(), TOKENS, WIDTH, GROUND) == []
    (one,) = talk.tensor_exchanges(SHAPE, Layout(tensor=2), TOKENS, WIDTH, GROUND)
    assert facts(one) == ("tensor", "all_reduce", size, 2, Place(2))
    (wide,) = talk.tensor_exchanges(SHAPE, Layout(tensor=8), TOKENS, WIDTH, GROUND)
    assert wide.place == Place(8)  # neighbours
    both = talk.tensor_exchanges(SHAPE, Layout(tensor=8, sequence_parallel=True), TOKENS, 4, GROUND)
    assert [facts(each) for each in both] == [
        ("tensor", "all_gather", 2 * size, 2, Place(8)),
        ("tensor", "reduce_scatter", 2 * size, 2, Place(8)),
    ]


def test_ulysses() -> None:
    """Queries, keys and values of 16 + 2 x 4 heads there, 16 heads back; half of them with tensor parallelism 2."""
    assert talk.sequence_exchanges(SHAPE, Layout(tensor=2), TOKENS, WIDTH, GROUND) == []
    there, back = talk.sequence_exchanges(SHAPE, Layout(tensor=2, sequence=2), TOKENS, WIDTH, GROUND)
    assert facts(there) == ("sequence", "all_to_all", 384 * 24 * 6 * 2 / 2, 1, Place(2))
    assert facts(back) == ("sequence", "all_to_all", 384 * 16 * 6 * 2 / 2, 1, Place(2))
    wide, _ = talk.sequence_exchanges(SHAPE, Layout(tensor=4, sequence=4), TOKENS, WIDTH, GROUND)
    assert wide.place == Place(2, 2, 4)  # ranks are four GPUs apart
    latent = replace(SHAPE, latent=Latent(1, 2, 3, 4, 5))
    there, _ = talk.sequence_exchanges(latent, Layout(sequence=2), TOKENS, WIDTH, GROUND)
    assert there.size == 384 * 3 * 16 * 6 * 2


@pytest.mark.parametrize(("tensor", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ring_attention(tensor: int, heads: int) -> None:
    """Keys and values of a GPU's key heads, sent on twice in a ring of three."""
    (one,) = talk.sequence_exchanges(SHAPE, Layout(tensor=tensor, context=3), TOKENS, WIDTH, GROUND)
    place = Place(1) if tensor < 8 else Place(1, 2, 8)
    assert facts(one) == ("context", "send", 384 * 2 * heads * 6 * 2, 2, place)


def test_ring_and_ulysses_together() -> None:
    *_, ring = talk.sequence_exchanges(SHAPE, Layout(tensor=2, sequence=4, context=2), TOKENS, WIDTH, GROUND)
    assert (ring.times, ring.place) == (1, Place(1, 2, 8))  # ranks are 2 x 4 GPUs apart


def test_expert_parallelism() -> None:
    assert talk.expert_exchanges(SPARSE, Layout(data=2), TOKENS, WIDTH, GROUND) == []
    assert talk.expert_exchanges(SHAPE, Layout(data=2, expert=2), TOKENS, WIDTH, GROUND) == []
    (one,) = talk.expert_exchanges(SPARSE, Layout(tensor=2, expert=2, context=2), TOKENS, WIDTH, GROUND)
    assert facts(one) == ("expert", "all_to_all", 384 * 3 * 64 * 2 / 2, 2, Place(2))
    (far,) = talk.expert_exchanges(SPARSE, Layout(tensor=2, sequence=2, context=2, expert=5), TOKENS, WIDTH, GROUND)
    assert far.place == Place(1, 5, 8)


def test_sends_between_stages() -> None:
    assert talk.pipeline_exchange(SHAPE, Layout(tensor=2), TOKENS, WIDTH, GROUND) is None
    one = talk.pipeline_exchange(SHAPE, Layout(tensor=2, data=3, pipeline=2), TOKENS, WIDTH, GROUND)
    assert one and facts(one) == ("pipeline", "send", 384 * 64 * 2 / 2, 1, Place(1))  # six GPUs apart
    near = talk.pipeline_exchange(SHAPE, Layout(data=7, pipeline=2), TOKENS, WIDTH, GROUND)
    assert near and near.place == Place(1)
    far = talk.pipeline_exchange(SHAPE, Layout(tensor=2, data=4, pipeline=3), TOKENS, WIDTH, GROUND)
    assert far and far.place == Place(1, 2, 8)


def reduction(zero: int, experts: float = 0.0, **more: int) -> dict[str, list[tuple[str, float, float, Place]]]:
    layout = Layout(**({"data": 4, "tensor": 2, "sequence": 3, "context": 1} | more), zero=zero)
    software = replace(program("megatron-core"), gradient_bytes=4)
    found = talk.data_exchanges(1000.0, experts, layout, WIDTH, software, GROUND)
    return {
        name: [(each.kind, each.size, each.times, each.place) for each in getattr(found, name)]
        for name in ("reduce", "gather", "every_forward", "every_backward")
    }


# 4 x 3 data-parallel ranks two GPUs apart: four in a domain, three domains, two groups on its cards.
SCATTER, GATHER = ("reduce_scatter", 4000, 1, Place(4, 3, 2)), ("all_gather", 2000, 1, Place(4, 3, 2))


@pytest.mark.parametrize(
    ("zero", "reduce", "gather", "every_forward", "every_backward"),
    [
        (0, [("all_reduce", 4000, 1, Place(4, 3, 2))], [], [], []),
        (1, [SCATTER], [GATHER], [], []),
        (2, [], [GATHER], [], [SCATTER]),
        (3, [], [], [GATHER], [GATHER, SCATTER]),
    ],
)
def test_data_parallelism(zero: int, reduce: list, gather: list, every_forward: list, every_backward: list) -> None:
    assert reduction(zero) == {
        "reduce": reduce,
        "gather": gather,
        "every_forward": every_forward,
        "every_backward": every_backward,
    }


def test_ring_ranks_are_data_parallel_too() -> None:
    assert reduction(0, sequence=1, context=3)["reduce"] == [("all_reduce", 4000, 1, Place(4, 3, 2))]


def test_experts_have_fewer_data_parallel_ranks_farther_apart() -> None:
    found = reduction(1, experts=500.0, expert=6)["reduce"]
    assert found == [SCATTER, ("reduce_scatter", 2000, 1, Place(1, 2, 8))]  # 12 / 6 ranks, 2 x 6 GPUs apart
    assert reduction(1, experts=500.0, expert=12)["reduce"] == [SCATTER]  # one rank has nothing to reduce


def test_a_single_rank_exchanges_nothing() -> None:
    assert reduction(0, data=1, sequence=1) == {"reduce": [], "gather": [], "every_forward": [], "every_backward": []}
