"""Times all-reduces within nodes, between pairs of nodes, and over all nodes of a team."""

from collections.abc import Callable, Sequence

from strata.platform.errors import UserError
from strata.training.bench.fabric import tournament
from strata.training.bench.fabric.analysis import Exchange, Measurement
from strata.training.bench.fabric.member import Place
from strata.training.bench.fabric.teams import CALL_S, NoAnswerError, Team

COLLECTIVE_S = CALL_S - 60  # a collective fails before the call does, so that the answers name the ranks


def measure(team: Team, sizes: Sequence[int], rounds: int, say: Callable[[str], None]) -> tuple[Measurement, str | None]:
    """Measurement, and the GPU's name; None on CPUs. Sizes are in bytes, ascending; within nodes and in pairs, only the largest.

    The collectives of the fewest nodes come first, so that a failure names few."""
    nodes = node_names(team.places)
    members = _ranks_by_node(nodes)
    ranks, size = len(nodes), sizes[-1]
    try:
        say("connecting")
        address = team.call("open", [(None if rank else team.host,) for rank in range(ranks)])[0]
        gpu = team.call("join", [(address, rank, ranks, COLLECTIVE_S) for rank in range(ranks)])[0]
        inside = {}
        if len(members[0]) > 1:
            say("within each node")
            taken = team.call("all_reduce", [(one, (size,)) for one in members for _ in one])
            inside = {nodes[one[0]]: max(taken[rank][0] for rank in one) for one in members}
        exchanges: list[Exchange] = []
        matches = tournament.rounds(len(members), rounds)
        for number, match in enumerate(matches, 1):
            say(f"pairs of nodes, round {number} of {len(matches)}")
            exchanges += _exchanges(team, members, match, size)
        say("all nodes")
        world = team.call("all_reduce", [(range(ranks), tuple(sizes))] * ranks)
        team.call("leave", [()] * ranks)
    except NoAnswerError as error:
        silent = sorted({nodes[rank] for rank in error.ranks})
        raise UserError(
            f"The network failed at {', '.join(silent[:8])}{' and others' if len(silent) > 8 else ''}: {error.reason}",
            "Look at the pods' logs for NCCL's messages (NCCL_DEBUG=WARN), and replace the node.",
        ) from None
    by_size = {each: max(seconds[i] for seconds in world) for i, each in enumerate(sizes)}
    return Measurement(tuple(nodes), size, inside, exchanges, by_size), gpu


def node_names(places: Sequence[Place]) -> list[str]:
    """Node of each rank, by its host's name where that is unique."""
    hosts: dict[str, set[str]] = {}
    for place in places:
        hosts.setdefault(place.host, set()).add(place.node)
    return [place.host if len(hosts[place.host]) == 1 else f"{place.host} ({place.node[:8]})" for place in places]


def _ranks_by_node(nodes: Sequence[str]) -> list[tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in found.values()}
    if len(sizes) > 1:
        counts = ", ".join(f"{node} {len(ranks)}" for node, ranks in found.items())
        raise UserError(
            f"The workers are spread unevenly over the nodes: {counts}.", "Set parallel.workers to a multiple of a node's GPUs."
        )
    return [tuple(ranks) for ranks in found.values()]


def _exchanges(team: Team, members: Sequence[tuple[int, ...]], match: Sequence[tuple[int, int]], size: int) -> list[Exchange]:
    """One round: each rank of a node with the same rank of its partner, all concurrently, so that every network card is busy."""
    pairs = [(a, b) for one, other in match for a, b in zip(members[one], members[other], strict=True)]
    partner = {rank: pair for pair in pairs for rank in pair}
    taken = team.call("all_reduce", [(partner.get(rank, ()), (size,)) for rank in range(sum(map(len, members)))])
    return [Exchange(pair, max(taken[pair[0]][0], taken[pair[1]][0])) for pair in pairs]
