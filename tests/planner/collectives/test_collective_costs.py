"""Times of collectives, by hand from NCCL's published tables.

Constants are written here again, in microseconds and gigabytes, from NCCL's `src/graph/tuning.cc`. A change of the planner's
tables or formulas changes its times and not these.
"""

import math
from collections import Counter

import pytest

from strata.planner.collectives import algorithms, congestion, cost, lab, nccl
from strata.planner.collectives.algorithms import Transfer, run
from strata.planner.collectives.cost import NOTHING, Cost, Links, costs_of_all, links, plans
from strata.planner.collectives.patterns import Kind, Place
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.specs import Fabric

MIB = 2**20
# 400 GB/s of links, 50 GB/s of cards for each of 8 GPUs, 300 GB/s of in-switch reduction, no congestion.
PLAIN = Links(400e9, 300e9, 50e9, 400e9, "infiniband", "rail", 1.0, launch=0.0)
SIZE = 96 * MIB


def seconds(kind: Kind, place: Place, algorithm: str, protocol: str, size: float = SIZE, wires: Links = PLAIN) -> float:
    [found] = [
        one.seconds for one in costs_of_all(kind, size, place, wires) if (one.algorithm, one.protocol) == (algorithm, protocol)
    ]
    return found


# kind, place, algorithm, protocol: latency in us, bytes over link and card per byte of the buffer, and their rates in GB/s.
RINGS: list[tuple[Kind, Place, str, str, float, float, float, float, float]] = [
    # One domain of 6: 10 hops of an all-reduce, 5 of a half; 2 x 5/6 and 5/6 of the buffer.
    ("all_reduce", Place(6), "ring", "LL", 6.6 + 10 * 0.6, 10 / 6, 400 * 0.8 * 0.38, 0, 1),
    ("all_reduce", Place(6), "ring", "LL128", 14 + 10 * 1.9, 10 / 6, 400 * 0.8 * 7 / 9, 0, 1),
    ("all_reduce", Place(6), "ring", "Simple", 1.4 * (8.4 + 10 * 3.4), 10 / 6, 400 * 0.8, 0, 1),
    ("all_gather", Place(6), "ring", "Simple", 8.4 + 5 * 3.4, 5 / 6, 400 * 0.8, 0, 1),
    ("reduce_scatter", Place(6), "ring", "LL", 6.6 + 5 * 0.6, 5 / 6, 400 * 0.8 * 0.38, 0, 1),
    # Three domains of 4: 2 x 9 hops inside, 2 x 2 outside; a quarter of 2 x 11/12 leaves through each card. A hop inside takes at
    # least the time to post to the network: 1 us in LL and LL128, 3 us in Simple. LL is polled at 20.4 GB/s a domain.
    ("all_reduce", Place(4, 3), "ring", "LL", 6.6 + 18 * 1 + 4 * 2.7, 11 / 6 * 3 / 4, 400 * 0.8 * 0.38, 11 / 24, 20.4 / 4),
    ("all_reduce", Place(4, 3), "ring", "LL128", 14 + 18 * 1.9 + 4 * 4, 11 / 8, 320 * 7 / 9, 11 / 24, 50 * 0.96 * 0.92),
    ("all_reduce", Place(4, 3), "ring", "Simple", 1.4 * (8.4 + 18 * 3.4 + 4 * 14), 11 / 8, 400 * 0.8, 11 / 24, 50 * 0.96),
    ("all_gather", Place(4, 3), "ring", "Simple", 8.4 + 9 * 3.4 + 2 * 14, 11 / 16, 400 * 0.8, 11 / 48, 50 * 0.96),
    # Two domains of 4: LL is polled at 39 GB/s a domain.
    ("all_gather", Place(4, 2), "ring", "LL", 6.6 + 6 * 1 + 1 * 2.7, 7 / 8 * 3 / 4, 400 * 0.8 * 0.38, 7 / 32, 39 / 4),
    # One rank a domain: the hops are a tree's, as nothing inside hides them. At 48 GB/s, LL's half is less than the polling rate.
    ("all_gather", Place(1, 3), "ring", "LL128", 14 + 2 * 8.5, 0, 1, 2 / 3, 50 * 0.96 * 0.92),
    ("all_gather", Place(1, 2), "ring", "LL", 6.6 + 1 * 5, 0, 1, 1 / 2, 50 * 0.96 * 0.5),
    ("all_gather", Place(1, 3), "ring", "LL", 6.6 + 2 * 5, 0, 1, 2 / 3, 20.4),
    # PAT: logarithmic hops of a card, and 2.8 us a rank.
    ("all_gather", Place(1, 5), "pat", "Simple", 8 + 5 * 2.8 + 3 * 4, 0, 1, 4 / 5, 50 * 0.96 * 0.75),
    # Pairs, 8 at a time, at a lower share of the link.
    ("all_to_all", Place(6), "pairwise", "Simple", 8.4 + 1 * 3.4, 5 / 6, 400 * 0.71, 0, 1),
    ("all_to_all", Place(10), "pairwise", "Simple", 8.4 + 2 * 3.4, 9 / 10, 400 * 0.71, 0, 1),
    ("all_to_all", Place(10), "pairwise", "LL", 6.6 + 2 * 0.6, 9 / 10, 400 * 0.71 * 0.38, 0, 1),
    # A send inside a domain, or between two.
    ("send", Place(1), "direct", "Simple", 8.4 + 3.4, 1, 400 * 0.8, 0, 1),
    ("send", Place(1, 2), "direct", "Simple", 8.4 + 14, 0, 1, 1, 50 * 0.96),
    ("send", Place(1, 2), "direct", "LL", 6.6 + 2.7, 0, 1, 1, 50 * 0.96 * 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "place", "algorithm", "protocol", "latency", "inside", "link", "outside", "card"), RINGS)
def test_rings_and_pairs_by_hand(
    kind: Kind,
    place: Place,
    algorithm: str,
    protocol: str,
    latency: float,
    inside: float,
    link: float,
    outside: float,
    card: float,
) -> None:
    transfer = max(SIZE * inside / link, SIZE * outside / card) / 1e9
    assert seconds(kind, place, algorithm, protocol) == pytest.approx(latency * 1e-6 + transfer, rel=1e-9)


# Trees and chains pass the buffer in rounds of 16 chunks; the first round passes all hops. Latency in us, bytes, rates in GB/s,
# hops inside and outside, and KiB of a chunk.
TREE = 0.92 * 0.85
TREES: list[tuple[Kind, Place, str, str, float, float, float, float, float, int, int, float]] = [
    ("all_reduce", Place(4, 3), "tree", "LL", 6.8 + 6 * 0.6 + 4 * 5, 2, 400 * 0.8 * TREE / 3.8, 2 / 4, 20.4 / 4, 6, 4, 32),
    ("all_reduce", Place(4, 3), "tree", "LL128", 14 + 7.5 + 4 * 8.5, 2, 320 * TREE * 7 / 9, 2 / 4, 44.16 * 15 / 16, 6, 4, 64),
    ("all_reduce", Place(4, 3), "tree", "Simple", 8.4 + 6 * 4 + 4 * 14, 2, 320 * TREE, 2 / 4, 48 * 0.92, 6, 4, 512),
    ("all_reduce", Place(2, 9), "tree", "Simple", 8.4 + 2 * 4 + 8 * 14, 1, 320 * TREE, 3 / 2, 48 * 0.92, 2, 8, 512),
    ("all_reduce", Place(4, 3), "double_tree", "Simple", 8.4 + 6 * 4 + 4 * 14, 2, 320 * TREE, 3 / 8, 48 * 0.92, 6, 4, 512),
    ("all_reduce", Place(2, 9), "double_tree", "Simple", 8.4 + 2 * 4 + 8 * 14, 1, 320 * TREE, 1, 48 * 0.92, 2, 8, 512),
    ("broadcast", Place(4, 3), "chain", "Simple", 8.4 + 9 * 3.4 + 2 * 14, 3 / 4, 320, 1 / 4, 48, 9, 2, 512),
    ("broadcast", Place(6), "chain", "LL128", 14 + 5 * 1.9, 1, 320 * 7 / 9, 0, 1, 5, 0, 64),
    # With a card for every GPU, LL's share of a card (0.92 / 3.8) is below the polling rate of two domains.
    ("all_reduce", Place(1, 2), "double_tree", "LL", 6.8 + 2 * 5, 0, 320 * TREE / 3.8, 1, 48 * 0.92 / 3.8, 0, 2, 32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "place", "algorithm", "protocol", "latency", "inside", "link", "outside", "card", "near", "far", "chunk"), TREES
)
def test_trees_and_chains_by_hand(
    kind: Kind,
    place: Place,
    algorithm: str,
    protocol: str,
    latency: float,
    inside: float,
    link: float,
    outside: float,
    card: float,
    near: int,
    far: int,
    chunk: float,
) -> None:
    fill = 16 * chunk * 1024 * (near / link + far / (place.inside * card)) / 1e9
    transfer = max(SIZE * inside / link, SIZE * outside / card) / 1e9
    assert seconds(kind, place, algorithm, protocol) == pytest.approx(latency * 1e-6 + transfer + fill, rel=1e-9)


def test_a_buffer_smaller_than_a_round_fills_with_its_own_size() -> None:
    taken = seconds("broadcast", Place(6), "chain", "Simple", size=MIB)
    assert taken == pytest.approx((8.4 + 5 * 3.4) * 1e-6 + MIB / 320e9 + MIB * 5 / 320e9)


@pytest.mark.parametrize(
    ("mib", "round_mib"),
    [(0.5, 0.5), (4.0, 1.5), (24.0, 3.0), (96.0, 12.0), (200.0, 12.0)],
)
def test_in_switch_reduction_by_hand(mib: float, round_mib: float) -> None:
    """Six ranks: a round is an eighth of the buffer, at least 16 x 6 x 16 KiB = 1.5 MiB and at most 16 x 6 x 128 KiB = 12 MiB.
    Before each round the ranks synchronize for four hops of 0.6 us; the single hop takes 25 us."""
    size, one = mib * MIB, round_mib * MIB
    inside = size * 7 / 6 / 300e9 + 2.4e-6 * mib / round_mib
    assert seconds("all_reduce", Place(6), "nvls", "Simple", size) == pytest.approx(25e-6 + inside + one / 300e9)


def test_in_switch_reduction_between_domains_by_hand() -> None:
    """Rounds of 16 x 6 x 64 KiB = 6 MiB; 8 x 57.7 of 525 GB/s."""
    rate = 300e9 * 8 * 57.7 / 525
    inside, outside = SIZE * 7 / 6 / rate, SIZE * 3 / 2 / 6 / 48e9
    fill = 6 * MIB * (1 / rate + 4 / (6 * 48e9))
    expected = (25 + 4 * 20.9) * 1e-6 + max(inside, outside) + fill
    assert seconds("all_reduce", Place(6, 3), "nvls_tree", "Simple") == pytest.approx(expected)


ALGORITHMS: list[tuple[Kind, Place, set[str]]] = [
    ("all_reduce", Place(4), {"ring", "double_tree"}),
    ("all_reduce", Place(5), {"ring", "double_tree", "nvls"}),
    ("all_reduce", Place(4, 2), {"ring", "double_tree", "tree"}),
    ("all_reduce", Place(5, 2), {"ring", "double_tree", "tree", "nvls_tree"}),
    ("all_gather", Place(2, 2), {"ring"}),
    ("all_gather", Place(1, 2), {"ring", "pat"}),
    ("all_gather", Place(1), {"ring"}),
]


@pytest.mark.parametrize(("kind", "place", "names"), ALGORITHMS)
def test_algorithms_that_nccl_could_choose(kind: Kind, place: Place, names: set[str]) -> None:
    assert {plan.pattern.algorithm for plan in plans(kind, place, PLAIN)} == names
    without = Links(400e9, 0.0, 50e9, 400e9, "infiniband", "rail", 1.0, 0.0)
    assert {plan.pattern.algorithm for plan in plans(kind, place, without)} == names - {"nvls", "nvls_tree"}


def test_protocols_of_each_algorithm() -> None:
    found: dict[str, list[str]] = {}
    for kind, place in (
        ("all_reduce", Place(5, 2)),
        ("all_reduce", Place(5)),
        ("all_gather", Place(1, 2)),
        ("all_to_all", Place(2)),
    ):
        for plan in plans(kind, place, PLAIN):  # type: ignore[arg-type]
            names = found.setdefault(plan.pattern.algorithm, [])
            names += [plan.protocol] if plan.protocol not in names else []
    every = ["LL", "LL128", "Simple"]
    assert found == {
        "ring": every,
        "double_tree": every,
        "tree": every,
        "nvls_tree": ["Simple"],
        "nvls": ["Simple"],
        "pat": ["Simple"],
        "pairwise": ["LL", "Simple"],
    }


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
@pytest.mark.parametrize("place", [Place(8), Place(4, 3), Place(1, 6), Place(5, 2, 2)])
@pytest.mark.parametrize("size", [1024.0, 3e6, 1e9])
def test_the_fastest_is_chosen(kind: Kind, place: Place, size: float) -> None:
    wires = Links(400e9, 300e9, 50e9, 400e9, "infiniband", "rail", 1.0, launch=7e-6)
    best, every = cost.cost(kind, size, place, wires), costs_of_all(kind, size, place, wires)
    assert best == min(every, key=lambda one: one.seconds)
    plain = cost.cost(kind, size, place, PLAIN)
    assert best.seconds == pytest.approx(plain.seconds + 7e-6, rel=1e-12)


def test_bus_bandwidth_and_bytes_of_a_cost() -> None:
    found = cost.cost("all_gather", SIZE, Place(6), PLAIN)
    assert found.wire_bytes_inside == pytest.approx(SIZE * 5 / 6) and found.wire_bytes_outside == 0
    assert found.busbw == pytest.approx(SIZE * 5 / 6 / found.seconds)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("send", 1.0),
    ],
)
def test_bus_factors_of_four_ranks(kind: Kind, factor: float) -> None:
    assert cost.bus_factor(kind, 4) == factor


def test_nothing_costs_nothing() -> None:
    assert Cost(0.0, "none", "none", 0.0, 0.0, 0.0) == NOTHING
    assert cost.cost("all_reduce", 0.0, Place(4), PLAIN) is NOTHING
    assert cost.cost("all_reduce", -1.0, Place(4), PLAIN) is NOTHING
    assert cost.cost("all_reduce", 1.0, Place(1), PLAIN) is NOTHING
    assert cost.cost("all_reduce", 0.5, Place(2), PLAIN).seconds > 0
    assert cost.cost("send", 1.0, Place(1), PLAIN).seconds > 0


def test_groups_share_the_cards_of_a_domain() -> None:
    """400 GB/s of cards for 2 x 3 ranks in 3 groups of 2 are 66 GB/s each, and a GPU has 50. For 5 x 2 ranks, 40."""
    half, full = Place(2, 2, 3), Place(2, 2, 5)
    for place, card in ((half, 50), (full, 40)):
        [plan] = [one for one in plans("all_gather", place, PLAIN) if one.protocol == "Simple"]
        assert plan.card == pytest.approx(card * 1e9)
        assert plan.outside_rate == pytest.approx(card * 0.96e9)


def test_links_of_a_gpu_and_a_fabric() -> None:
    """Half of the cards of a fabric with two a GPU; PCIe limits them. In-switch reduction: 0.85 x 20.6/25 of a Hopper link and
    0.74 x 40.1/50 of a Blackwell link."""
    h100, b200, a100 = (hardware.gpu(name) for name in ("h100-sxm", "b200", "a100-80gb"))
    fabric = Fabric("test", 20e9, 16, "roce", "fat-tree", 3.0)
    found = links(h100, fabric)
    assert found.launch == pytest.approx(20e-6) and links(h100, fabric, 0.0).launch == 0.0
    assert (found.link, found.cards) == (h100.link, 320e9)
    assert found.card == min(h100.pcie, 40e9) == 40e9
    assert (found.kind, found.topology, found.oversubscription) == ("roce", "fat-tree", 3.0)
    assert links(h100, Fabric("few", 20e9, 4, "roce", "rail", 1.0)).card == 20e9
    assert links(h100, Fabric("many", 400e9, 8, "roce", "rail", 1.0)).card == h100.pcie
    assert found.adds == pytest.approx(h100.link * 0.85 * 20.6 / 25)
    assert links(b200, fabric).adds == pytest.approx(b200.link * 0.74 * 40.1 / 50)
    assert links(a100, fabric).adds == 0.0


# Congestion


@pytest.mark.parametrize(
    ("traffic", "topology", "domains", "share"),
    [
        ("everyone", "rail", 1, 0.0),
        ("everyone", "rail", 2, 3 / 4),
        ("neighbours", "rail", 100, 0.0),
        ("far", "rail", 100, 0.0),
        ("far", "fat-tree", 4, 0.0),  # a leaf has 32 x 50 GB/s, 4 domains of 400
        ("far", "fat-tree", 5, 1.0),
        ("neighbours", "fat-tree", 5, 1 / 4),
        ("everyone", "fat-tree", 10, 6 / 9),
        ("everyone", "fat-tree", 1, 0.0),
    ],
)
def test_share_of_traffic_that_leaves_a_leaf(traffic: congestion.Traffic, topology: str, domains: int, share: float) -> None:
    assert congestion.crossing(traffic, topology, domains, 4, 400e9) == pytest.approx(share)


def test_a_domain_larger_than_a_leaf_has_a_leaf() -> None:
    assert congestion.crossing("neighbours", "fat-tree", 2, 72, 3600e9) == 1.0


def poisson_maximum(paths: int, mean: float) -> float:
    """Expected largest of `paths` Poisson numbers, from the distribution of the maximum."""
    below, previous, total = 0.0, 0.0, 0.0
    for k in range(400):
        below += math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
        total += k * (min(1.0, below) ** paths - previous)
        previous = min(1.0, below) ** paths
    return total


@pytest.mark.parametrize(("paths", "mean"), [(1, 3.0), (32, 0.5), (32, 2.0), (32, 4.0), (8, 100.0)])
def test_expected_maximum_of_poisson_numbers(paths: int, mean: float) -> None:
    assert congestion.expected_maximum(paths, mean) == pytest.approx(poisson_maximum(paths, mean), rel=1e-6)


@pytest.mark.parametrize(
    ("traffic", "kind", "share", "over", "slower"),
    [
        ("far", "roce", 0.0, 4.0, 1.0),
        ("far", "infiniband", 0.5, 1.0, 1.0),
        ("far", "infiniband", 0.5, 4.0, 2 + math.log2(math.log(32)) / 120),
        ("far", "roce", 1.0, 1.0, poisson_maximum(32, 4.0) / 4),
        ("neighbours", "roce", 0.25, 2.0, max(1.0, poisson_maximum(32, 2.0) / 4)),
        ("everyone", "roce", 0.75, 2.0, poisson_maximum(32, 48.0) / 32),
        ("neighbours", "roce", 1e-4, 1.0, 1.0),
    ],
)
def test_slowdown_by_hand(traffic: congestion.Traffic, kind: str, share: float, over: float, slower: float) -> None:
    """4 flows a card, 32 in an all-to-all, over 32 paths."""
    assert congestion.slowdown(traffic, kind, share, over) == pytest.approx(slower, rel=1e-6)


def test_congestion_slows_the_cards_of_a_plan() -> None:
    """Ten domains of 8 x 50 GB/s, 4 under a leaf: two thirds of an all-to-all leave the leaf, over uplinks of a third."""
    narrow = Links(400e9, 0.0, 50e9, 400e9, "infiniband", "fat-tree", 3.0, 0.0)
    [plan] = [one for one in plans("all_to_all", Place(8, 10), narrow) if one.protocol == "Simple"]
    assert plan.slowdown == pytest.approx(2 + math.log2(math.log(32)) / 120)
    assert plan.outside_rate == pytest.approx(50e9 * 0.96 / plan.slowdown)


# Algorithms step by step


def test_a_step_reads_the_buffers_before_it() -> None:
    """Two ranks exchange a chunk; a third adds to what is absent at its target."""
    step = [Transfer(0, 1, (0,), "copy"), Transfer(1, 0, (0,), "copy"), Transfer(0, 2, (0,), "add")]
    buffers = [{0: Counter([0])}, {0: Counter([1])}, {}]
    after = run([step], buffers)  # type: ignore[list-item]
    assert [each[0] for each in after] == [Counter([1]), Counter([0]), Counter([0])]
    assert [dict(each) for each in buffers] == [{0: Counter([0])}, {0: Counter([1])}, {}]


@pytest.mark.parametrize(
    ("ranks", "parents"),
    [
        # NCCL's trees.cc draws the tree of 14: 8 below 0, 4 and 12 below 8, ...; 13's parent 14 is absent, so 12
        (14, [None, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12]),
        (2, [None, 0]),
        (5, [None, 2, 4, 2, 0]),
    ],
)
def test_parents_of_nccls_tree(ranks: int, parents: list[int | None]) -> None:
    assert [algorithms.parent(rank, ranks) for rank in range(ranks)] == parents


def names(steps: list[list[Transfer]]) -> list[str]:
    return [
        " ".join(
            f"{one.source}{'+' if one.action == 'add' else '='}{one.target}:{','.join(map(str, one.chunks))}" for one in step
        )
        for step in steps
    ]


STEPS: list[tuple[algorithms.Algorithm, list[str]]] = [
    (algorithms.ring(3), ["0+1:0 1+2:1 2+0:2", "0+1:2 1+2:0 2+0:1", "0=1:1 1=2:2 2=0:0", "0=1:0 1=2:1 2=0:2"]),
    (algorithms.tree(3), ["1+2:0", "2+0:0", "0=2:0", "2=1:0"]),
    (algorithms.double_tree(3), ["1+2:0 2+0:1", "2+0:0 0+1:1", "0=2:0 1=0:1", "2=1:0 0=2:1"]),
    (algorithms.double_tree(2), ["1+0:0 0+1:1", "0=1:0 1=0:1"]),
    (algorithms.nvls(2), ["0+2:0,1 1+2:0,1", "2=0:0 2=1:1", "0=2:0 1=2:1", "2=0:0,1 2=1:0,1"]),
    (algorithms.halving_doubling(3), ["2+0:0,1", "0+1:1 1+0:0", "1=0:1 0=1:0", "0=2:0,1"]),
    (
        algorithms.halving_doubling(4),
        [
            "0+2:2,3 1+3:2,3 2+0:0,1 3+1:0,1",
            "0+1:1 1+0:0 2+3:3 3+2:2",
            "1=0:1 0=1:0 3=2:3 2=3:2",
            "2=0:2,3 3=1:2,3 0=2:0,1 1=3:0,1",
        ],
    ),
    (algorithms.pairwise(3), ["0=1:1 1=2:5 2=0:6", "0=2:2 1=0:3 2=1:7"]),
    (
        algorithms.hierarchical(2, 2),
        [
            "0+1:0,1 1+0:2,3 2+3:0,1 3+2:2,3",
            "0+2:2 2+0:3 1+3:0 3+1:1",
            "0=2:3 2=0:2 1=3:1 3=1:0",
            "0=1:2,3 1=0:0,1 2=3:2,3 3=2:0,1",
        ],
    ),
]


@pytest.mark.parametrize(("algorithm", "steps"), STEPS, ids=lambda value: getattr(value, "name", ""))
def test_steps_by_hand(algorithm: algorithms.Algorithm, steps: list[str]) -> None:
    assert names(algorithm.steps) == steps


def test_bytes_of_ranks_and_switches() -> None:
    found = algorithms.nvls(4)
    assert (found.nodes, found.ranks, found.switches) == (5, 4, 1)
    assert (found.sent(0), found.received(0)) == (1.25, 1.25)
    assert (found.sent(4), found.received(4)) == (4 + 1, 4 + 1)
    assert algorithms.hierarchical(2, 3).chunks == 6 and algorithms.ring(5).nodes == 5


# The lab


def test_the_hierarchical_all_reduce_is_three_calls() -> None:
    """Inside a domain of 4, between 3 domains with a quarter of the buffer and 4 groups that share the cards, inside again."""
    found = lab.by_algorithm("all_reduce", SIZE, Place(4, 3, 2), PLAIN)
    near, far = Place(4), Place(1, 3, 8)
    scatter, gather = (cost.cost(kind, SIZE, near, PLAIN).seconds for kind in ("reduce_scatter", "all_gather"))
    assert found["hierarchical"] == pytest.approx(scatter + cost.cost("all_reduce", SIZE / 4, far, PLAIN).seconds + gather)
    assert found["ring"] == min(seconds("all_reduce", Place(4, 3, 2), "ring", each) for each in nccl.PROTOCOLS)
    assert "hierarchical" in lab.by_algorithm("all_reduce", SIZE, Place(2, 2), PLAIN)
    for kind, place in (("all_reduce", Place(4)), ("all_reduce", Place(1, 3)), ("all_gather", Place(4, 3))):
        assert "hierarchical" not in lab.by_algorithm(kind, SIZE, place, PLAIN)  # type: ignore[arg-type]


def test_crossovers_are_within_a_thousandth() -> None:
    found = lab.crossovers("all_reduce", Place(8, 4), PLAIN)
    assert len(found) >= 2
    for one in found:
        before, after = (cost.cost("all_reduce", one.size * factor, Place(8, 4), PLAIN) for factor in (0.9985, 1.0))
        assert f"{before.algorithm}/{before.protocol}" == one.before
        assert f"{after.algorithm}/{after.protocol}" == one.after
    sizes = [one.size for one in found]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(("chunks", "text"), [((0, 1, 2, 5), "0-2,5"), ((3,), "3"), ((7, 6), "6-7"), ((0, 2, 4), "0,2,4")])
def test_chunk_ranges(chunks: tuple[int, ...], text: str) -> None:
    assert lab._ranges(chunks) == text


def test_transfers_as_text() -> None:
    nvls, pairwise = algorithms.nvls(4), algorithms.pairwise(4)
    assert lab._transfer(Transfer(3, 4, (0, 1), "add"), nvls) == "3→switch:+0-1"
    assert lab._transfer(Transfer(4, 3, (2,), "copy"), nvls) == "switch→3:=2"
    assert lab._transfer(Transfer(1, 3, (7,), "copy"), pairwise) == "1→3"


def test_captions_of_shown_algorithms() -> None:
    assert lab.show("ring", 4).caption == "6 steps; a rank sends 1.5 times its buffer, cut into 4. + adds, = copies"
    assert "a rank sends 1 to 3 times its buffer" in str(lab.show("tree", 5).caption)
    assert "6 ranks" in str(lab.show("hierarchical", 6, 2).title)


@pytest.mark.parametrize(
    ("name", "ranks", "inside", "allowed"),
    [
        ("ring", 1, None, False),
        ("ring", 2, None, True),
        ("ring", 32, None, True),
        ("ring", 33, None, False),
        ("hierarchical", 8, 4, True),
        ("hierarchical", 8, 3, False),
        ("hierarchical", 8, None, False),
        ("star", 8, None, False),
    ],
)
def test_algorithms_that_can_be_shown(name: str, ranks: int, inside: int | None, allowed: bool) -> None:
    if allowed:
        assert lab._algorithm(name, ranks, inside).ranks == ranks
    else:
        with pytest.raises(UserError):
            lab._algorithm(name, ranks, inside)


@pytest.mark.parametrize(
    ("size", "text"),
    [(1023, "1023 B"), (1024, "1 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**20 - 1, "1.02e+03 KiB"), (4 * 2**30, "4 GiB")],
)
def test_bytes_as_text(size: float, text: str) -> None:
    assert lab._bytes(size) == text


@pytest.mark.parametrize(("taken", "text"), [(0.00099, "990.0 µs"), (0.001, "1.00 ms"), (1.5, "1,500.00 ms")])
def test_times_as_text(taken: float, text: str) -> None:
    assert lab._time(taken) == text


@pytest.mark.parametrize(("size", "ranks", "whole"), [(1, 2, 8), (100, 3, 96), (102, 3, 96), (103, 3, 108), (4096, 4, 4096)])
def test_measured_buffers_have_whole_values_for_each_rank(size: int, ranks: int, whole: int) -> None:
    assert lab._whole(size, ranks) == whole


class FakeTorch:
    """Stands for torch on a machine with `gpus` GPUs."""

    def __init__(self, gpus: int) -> None:
        self.cuda = self
        self.gpus = gpus

    def device_count(self) -> int:
        return self.gpus


def measured(
    monkeypatch: pytest.MonkeyPatch, gpus: int, taken: dict[int, float], wires: Links | None = None
) -> list[lab.Measured]:
    jobs: list[tuple[object, ...]] = []

    def workers(*job: object) -> dict[str, dict[int, float]]:
        jobs.append(job)
        return {"all_reduce": taken}

    monkeypatch.setitem(__import__("sys").modules, "torch", FakeTorch(gpus))
    monkeypatch.setattr(lab, "find_spec", lambda name: True)
    monkeypatch.setattr(lab, "_run_workers", workers)
    found = lab.measure(2, [800, 16, 808, 16], ["all_reduce"], wires)
    assert jobs == [("nccl" if gpus >= 2 else "gloo", 2, [16, 800, 808], ["all_reduce"])]
    return found


def test_gloo_is_fitted_to_the_smallest_and_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 s for 16 bytes and 9 s for 816: 0.005 s a byte, 4.92 s without bytes."""
    found = measured(monkeypatch, 1, {16: 5.0, 416: 6.0, 816: 9.0})
    assert [one.predicted for one in found] == pytest.approx([5.0, 7.0, 9.0])
    assert [one.anchor for one in found] == [True, False, True] and {one.backend for one in found} == {"gloo"}
    table = lab.measured_table(found)
    assert list(table.columns[4].cells) == ["*", "+17%", "*"] and table.caption
    falling = measured(monkeypatch, 1, {16: 5.0, 816: 3.0})
    assert [one.predicted for one in falling] == [5.0, 5.0]  # no negative time a byte
    steep = measured(monkeypatch, 1, {16: 0.001, 816: 3.0})
    assert steep[0].predicted == pytest.approx(2.999 / 800 * 16)  # no negative latency


def test_nccl_is_compared_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, 2, {16: 5.0, 816: 9.0}, PLAIN)
    assert [one.predicted for one in found] == [cost.cost("all_reduce", size, Place(2), PLAIN).seconds for size in (16, 816)]
    assert not any(one.anchor for one in found) and lab.measured_table(found).caption is None
    assert all(one.anchor for one in measured(monkeypatch, 2, {16: 5.0, 816: 9.0}))  # without the links of this machine


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [8, 16]), (2, [8])])
def test_too_little_to_measure_is_refused(ranks: int, sizes: list[int]) -> None:
    with pytest.raises(UserError, match="too few to measure"):
        lab.measure(ranks, sizes)


def test_sizes_of_the_table() -> None:
    assert (lab.SIZES[0], lab.SIZES[-1], len(lab.SIZES)) == (1024.0, 4 * 2.0**30, 23)
    table = lab.costs("all_gather", Place(4), PLAIN)
    assert [column.header for column in table.columns] == ["size", "fastest", "time", "bus GB/s", "ring"]
    found = cost.cost("all_gather", 1024.0, Place(4), PLAIN)
    cells = [next(iter(column.cells)) for column in table.columns]
    assert [str(cell) for cell in cells] == [
        "1 KiB",
        "ring/LL",
        lab._time(found.seconds),
        f"{found.busbw / 1e9:,.1f}",
        lab._time(found.seconds),
    ]
    assert "4 ranks in one domain" in str(table.title) and "2 domains of 4 ranks" in str(
        lab.costs("all_gather", Place(4, 2), PLAIN).title
    )
