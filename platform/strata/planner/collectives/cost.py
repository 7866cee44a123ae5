"""Time of a collective under the algorithm and protocol that NCCL would choose.

An algorithm is an entry of `patterns.py`: the bytes that the busiest rank sends inside its NVLink domain and out of it, and the
number of sequential hops. The constants of `nccl.py` make it a `Plan` for a place. `cost` chooses the fastest plan for a size:

    seconds = launch + latency + max(time inside, time outside) + filling the pipeline

Transfers inside and outside overlap, since every algorithm forwards chunks as they arrive.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from strata.planner.collectives import congestion, nccl
from strata.planner.collectives.patterns import PATTERNS, TRAFFIC, Algorithm, Kind, Pattern, Place
from strata.planner.worksheet import Worksheet
from strata.platform.hardware.specs import Fabric, Gpu


@dataclass(frozen=True)
class Links:
    """Properties of a GPU and a fabric that collectives depend on; a cache key. Line rates in bytes per second."""

    link: float
    adds: float  # rate of in-switch reduction (NVLink SHARP); 0: not supported
    card: float  # network cards of one GPU
    cards: float  # network cards of a domain together
    kind: str
    topology: str
    oversubscription: float
    launch: float


@dataclass(frozen=True)
class Cost:
    """Time of a collective and the choice behind it.

    `wire_bytes_*` are the bytes that the busiest rank sends over its link and over its network card. `busbw` is NCCL's bus
    bandwidth: the rate of a ring's links in that time.
    """

    seconds: float
    algorithm: str
    protocol: str
    wire_bytes_inside: float
    wire_bytes_outside: float
    busbw: float


NOTHING = Cost(0.0, "none", "none", 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Plan:
    """A pattern under one protocol at one place, with every term of its time except the size."""

    pattern: Pattern
    protocol: nccl.Protocol
    base: float
    hop_inside: float
    hop_outside: float
    hops_inside: float
    hops_outside: float
    latency: float
    inside: float
    outside: float
    link_share: float
    card: float  # a rank's share of the network cards
    card_share: float
    slowdown: float
    inside_rate: float
    outside_rate: float
    pace: float  # seconds per byte of the slower of the two, in steady state
    least: float  # bytes of the buffer in a round
    most: float
    rounds: float
    handshake: float  # seconds before each round
    fill: float  # seconds per byte of a round, until the first round has passed all hops

    def round_bytes(self, size: float) -> float:
        """Bytes of the buffer in one round."""
        return min(size, max(self.least, min(self.most, size / self.rounds)))

    def seconds(self, size: float) -> float:
        """Seconds from the kernel's start. `explain` has the same formula line by line."""
        round_bytes = self.round_bytes(size)
        inside = size * self.inside / self.inside_rate + self.handshake * size / round_bytes
        outside = size * self.outside / self.outside_rate
        return self.latency + max(inside, outside) + round_bytes * self.fill


def links(gpu: Gpu, fabric: Fabric, launch: float = nccl.LAUNCH) -> Links:
    """Links of a GPU in a fabric. Use `launch` 0 where the host runs ahead of the GPU, as in a training step."""
    adding = nccl.NVLS_HOPPER if gpu.link <= nccl.HOPPER_LINK else nccl.NVLS_BLACKWELL
    return Links(
        link=gpu.link,
        adds=gpu.link * adding if gpu.multicast else 0.0,
        card=min(gpu.pcie, fabric.nic * max(1.0, fabric.nics / gpu.domain)),
        cards=fabric.nic * fabric.nics,
        kind=fabric.kind,
        topology=fabric.topology,
        oversubscription=fabric.oversubscription,
        launch=launch,
    )


@lru_cache(maxsize=2**17)
def cost(kind: Kind, size: float, place: Place, links: Links) -> Cost:
    """Cost under the fastest algorithm and protocol. `size` is the whole buffer of a rank: the gathered result, or the input of
    a reduction."""
    if size <= 0 or (place.ranks == 1 and kind != "send"):
        return NOTHING
    fastest, seconds = None, inf
    for plan in plans(kind, place, links):
        if plan.latency + size * plan.pace < seconds and (taken := plan.seconds(size)) < seconds:
            fastest, seconds = plan, taken
    assert fastest is not None
    return _as_cost(fastest, kind, size, place, links.launch + seconds)


def costs_of_all(kind: Kind, size: float, place: Place, links: Links) -> list[Cost]:
    """Costs of every algorithm and protocol, for comparison."""
    return [_as_cost(plan, kind, size, place, links.launch + plan.seconds(size)) for plan in plans(kind, place, links)]


def bus_factor(kind: Kind, ranks: int) -> float:
    """Bytes over a ring's links per byte of the buffer."""
    match kind:
        case "all_reduce":
            return 2 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (ranks - 1) / ranks
        case "broadcast" | "send":
            return 1.0


def _as_cost(plan: Plan, kind: Kind, size: float, place: Place, seconds: float) -> Cost:
    busbw = size * bus_factor(kind, place.ranks) / seconds
    return Cost(seconds, plan.pattern.algorithm, plan.protocol, size * plan.inside, size * plan.outside, busbw)


@lru_cache(maxsize=2**14)
def plans(kind: Kind, place: Place, links: Links) -> tuple[Plan, ...]:
    """Plans that NCCL could choose from."""
    found = []
    for pattern in PATTERNS[kind]:
        if _possible(pattern.algorithm, place, links):
            worksheet = _place_worksheet(pattern, place)
            found += [_plan(pattern, protocol, worksheet, kind, place, links) for protocol in _protocols(pattern.algorithm)]
    return tuple(found)


def _possible(algorithm: Algorithm, place: Place, links: Links) -> bool:
    match algorithm:
        case "nvls":
            return links.adds > 0 and place.domains == 1 and place.inside >= nccl.NVLS_RANKS
        case "nvls_tree":
            return links.adds > 0 and place.domains > 1 and place.inside >= nccl.NVLS_RANKS
        case "pat":
            return place.inside == 1 and place.domains > 1
        case "tree":
            return place.domains > 1
        case _:
            return True


def _protocols(algorithm: Algorithm) -> tuple[nccl.Protocol, ...]:
    match algorithm:
        case "nvls" | "nvls_tree" | "pat":
            return ("Simple",)
        case "pairwise" | "direct":
            return ("LL", "Simple")
        case _:
            return nccl.PROTOCOLS


def _place_worksheet(pattern: Pattern, place: Place) -> Worksheet:
    worksheet = Worksheet(f"{pattern.algorithm}: {pattern.why}")
    worksheet.given("inside", place.inside, "", "ranks per NVLink domain")
    worksheet.given("domains", place.domains, "", "domains that the group spans")
    worksheet.work_out("ranks", "inside * domains")
    worksheet.given("leaving", float(place.domains > 1), "", "whether anything leaves a domain")
    worksheet.work_out("hops_inside", pattern.hops_inside, "", "sequential hops over the link")
    worksheet.work_out("hops_outside", pattern.hops_outside, "", "sequential hops over the network")
    worksheet.work_out("inside_wire", pattern.inside, "", "bytes the busiest rank sends over its link, per byte of the buffer")
    worksheet.work_out("outside_wire", pattern.outside, "", "bytes it sends over its network card, per byte of the buffer")
    return worksheet


def _plan(pattern: Pattern, protocol: nccl.Protocol, worksheet: Worksheet, kind: Kind, place: Place, links: Links) -> Plan:
    base, hop_inside, hop_outside = _latencies(pattern, protocol, kind, place)
    link_share, card_share = _shares(pattern.algorithm, protocol, links)
    card = min(links.card, links.cards / (place.shared * place.inside))
    if protocol == "LL":
        polled = nccl.LL_TWO_DOMAINS if place.domains <= 2 else nccl.LL_MORE_DOMAINS
        card_share = min(card_share, polled / place.inside / card)
    slowed = _slowdown(kind, place, links)
    inside_rate, outside_rate = links.link * link_share, card * card_share / slowed
    least, most, rounds, handshake = _rounds(pattern.algorithm, protocol, place)
    hops_inside, hops_outside = worksheet["hops_inside"], worksheet["hops_outside"]
    pipelined = most < inf
    return Plan(
        pattern=pattern,
        protocol=protocol,
        base=base,
        hop_inside=hop_inside,
        hop_outside=hop_outside,
        hops_inside=hops_inside,
        hops_outside=hops_outside,
        latency=base + hops_inside * hop_inside + hops_outside * hop_outside,
        inside=worksheet["inside_wire"],
        outside=worksheet["outside_wire"],
        link_share=link_share,
        card=card,
        card_share=card_share,
        slowdown=slowed,
        inside_rate=inside_rate,
        outside_rate=outside_rate,
        pace=max(worksheet["inside_wire"] / inside_rate, worksheet["outside_wire"] / outside_rate),
        least=least,
        most=most,
        rounds=rounds,
        handshake=handshake,
        fill=(hops_inside / inside_rate + hops_outside / (place.inside * outside_rate)) if pipelined else 0.0,
    )


def _latencies(pattern: Pattern, protocol: nccl.Protocol, kind: Kind, place: Place) -> tuple[float, float, float]:
    base = nccl.BASE[pattern.family][protocol]
    hop_inside = nccl.HOP_INSIDE[pattern.family][protocol]
    hop_outside = nccl.HOP_OUTSIDE[pattern.family][protocol]
    if pattern.algorithm == "pat":
        base += place.ranks * nccl.PAT_RANK
    if pattern.algorithm == "ring" and place.domains > 1:
        hop_inside = max(hop_inside, nccl.POST[protocol])
        if place.inside == 1:
            hop_outside = nccl.HOP_OUTSIDE["tree"][protocol]  # no hops inside that could hide it
    if pattern.algorithm == "ring" and protocol == "Simple" and kind == "all_reduce":
        base, hop_inside, hop_outside = (nccl.PLATEAU * seconds for seconds in (base, hop_inside, hop_outside))
    return base, hop_inside, hop_outside


def _shares(algorithm: Algorithm, protocol: nccl.Protocol, links: Links) -> tuple[float, float]:
    """Shares of the line rates of link and card that an algorithm and protocol reach."""
    match algorithm:
        case "tree" | "double_tree":
            return nccl.LINK * nccl.TREE_SHARE[protocol], nccl.CARD * nccl.TREE_SHARE_OUTSIDE[protocol]
        case "nvls":
            return links.adds / links.link, nccl.CARD
        case "nvls_tree":
            return links.adds / links.link * nccl.NVLS_TREE, nccl.CARD
        case "pat":
            return nccl.LINK * nccl.PAT_SHARE, nccl.CARD * nccl.PAT_SHARE
        case "pairwise":
            return nccl.LINK_ALL_TO_ALL * nccl.RING_SHARE[protocol], nccl.CARD * nccl.RING_SHARE_OUTSIDE[protocol]
        case _:
            return nccl.LINK * nccl.RING_SHARE[protocol], nccl.CARD * nccl.RING_SHARE_OUTSIDE[protocol]


def _rounds(algorithm: Algorithm, protocol: nccl.Protocol, place: Place) -> tuple[float, float, float, float]:
    """Least and most bytes of the buffer per round, the number of rounds between them, and the handshake before a round.

    Rings and pairs use every link from the first step: one round.
    """
    in_flight = nccl.CHANNELS * place.inside
    match algorithm:
        case "nvls":
            least, most = in_flight * nccl.NVLS_CHUNK_LEAST, in_flight * nccl.NVLS_CHUNK_MOST
            return least, most, nccl.NVLS_ROUNDS, nccl.NVLS_HANDSHAKE
        case "nvls_tree":
            return 0.0, in_flight * nccl.NVLS_TREE_CHUNK, 1.0, 0.0  # the measured NVLS_TREE includes its handshakes
        case "tree" | "double_tree" | "chain":
            return 0.0, nccl.CHANNELS * nccl.CHUNK[protocol], 1.0, 0.0
        case _:
            return inf, inf, 1.0, 0.0


def _slowdown(kind: Kind, place: Place, links: Links) -> float:
    traffic = TRAFFIC[kind]
    share = congestion.crossing(traffic, links.topology, place.domains, place.inside, links.cards)
    return congestion.slowdown(traffic, links.kind, share, links.oversubscription)


def explain(kind: Kind, size: float, place: Place, links: Links) -> Worksheet:
    """Derivation of the chosen algorithm's time, as a worksheet. The last line equals `cost`."""
    chosen = cost(kind, size, place, links)
    if chosen is NOTHING:
        worksheet = Worksheet(f"{kind}: nothing to do")
        worksheet.given("seconds", 0.0, "s", "one rank, or no bytes")
        return worksheet
    plan = next(
        plan
        for plan in plans(kind, place, links)
        if (plan.pattern.algorithm, plan.protocol) == (chosen.algorithm, chosen.protocol)
    )
    worksheet = _place_worksheet(plan.pattern, place)
    worksheet.title = f"{kind} by {worksheet.title} ({plan.protocol})"
    worksheet.given("size", size, "B", "of a rank's whole buffer")
    worksheet.given("launch", links.launch, "s", "from the host's call to the kernel's start")
    worksheet.given("base", plan.base, "s", "NCCL's base latency")
    worksheet.given("hop_inside", plan.hop_inside, "s", f"NCCL's latency of a hop over NVLink in {plan.protocol}")
    worksheet.given("hop_outside", plan.hop_outside, "s", f"NCCL's latency of a hop over the network in {plan.protocol}")
    worksheet.work_out("latency", "base + hops_inside * hop_inside + hops_outside * hop_outside", "s")
    worksheet.given("link", links.link, "B/s", "the link's line rate")
    worksheet.given("link_share", plan.link_share, "", "share of the line rate that this algorithm and protocol reach")
    worksheet.work_out("inside_rate", "link * link_share", "B/s")
    if plan.fill:
        worksheet.given("least", plan.least, "B", "smallest part of the buffer in a round")
        worksheet.given("most", plan.most, "B", "largest part of the buffer in a round")
        worksheet.given("rounds", plan.rounds, "", "rounds, where their size is within these limits")
        worksheet.work_out("round_bytes", "min(size, max(least, min(most, size / rounds)))", "B", "of the buffer in a round")
        worksheet.given("handshake", plan.handshake, "s", "before each round")
        worksheet.work_out("inside_seconds", "size * inside_wire / inside_rate + handshake * size / round_bytes", "s")
    else:
        worksheet.work_out("inside_seconds", "size * inside_wire / inside_rate", "s")
    worksheet.given("card", plan.card, "B/s", "a rank's share of the network cards, at line rate")
    worksheet.given("card_share", plan.card_share, "", "share of the line rate that this algorithm and protocol reach")
    worksheet.given("slowdown", plan.slowdown, "", "from oversubscription and colliding flows")
    worksheet.work_out("outside_rate", "card * card_share / slowdown", "B/s")
    worksheet.work_out("outside_seconds", "size * outside_wire / outside_rate", "s")
    if plan.fill:
        hops = "hops_inside / inside_rate + hops_outside / (inside * outside_rate)"
        worksheet.work_out("fill", f"round_bytes * ({hops})", "s", "until the first round has passed all hops")
    else:
        worksheet.given("fill", 0.0, "s", "every link is busy from the first step")
    worksheet.work_out("seconds", "launch + latency + max(inside_seconds, outside_seconds) + fill", "s")
    return worksheet
