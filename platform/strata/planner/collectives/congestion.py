"""What the network between domains loses where traffic leaves a leaf switch: to too few uplinks, and to flows that were hashed
onto the same one.

A slowdown is how many times longer the traffic takes than at the cards' own rate. It never falls as oversubscription rises.
"""

import math
from functools import lru_cache
from typing import Literal

# Half of a 25.6 Tb/s switch, the largest of the years of H100 (Quantum-2, Tomahawk 4), looks down: 32 ports of 400 Gb/s. Its
# uplinks are counted as 32 at any oversubscription, which only makes them slower.
LEAF_BANDWIDTH = 32 * 50e9
PATHS = 32

# Flows of one card at a time. NCCL gives a card 2 channels and opens 2 connections on each; in an all-to-all a rank sends to 8
# peers at once.
FLOWS = 4
FLOWS_ALL_TO_ALL = 8 * FLOWS
# InfiniBand's switches choose an emptier port for every packet: what is thrown onto the paths are the packets that a card has
# on its way, 50 GB/s for 10 us in pieces of 4 KiB.
PACKETS = 120

Traffic = Literal["neighbours", "far", "everyone"]


def crossing(traffic: Traffic, topology: str, domains: int, inside: int, domain_bandwidth: float) -> float:
    """The share of what a domain's cards send that goes up from its leaf switch.

    Rings and trees are laid along the domains, so that of a leaf's domains only one at a time has its neighbour elsewhere. On
    rails, a rank's peers hang from its own rail's switches; only an all-to-all has traffic from one rail to another.
    """
    if domains <= 1:
        return 0.0
    if topology == "rail":
        return (inside - 1) / inside if traffic == "everyone" else 0.0
    leaf = max(1, int(LEAF_BANDWIDTH / domain_bandwidth))
    if domains <= leaf:
        return 0.0
    match traffic:
        case "neighbours":
            return 1 / leaf
        case "far":
            return 1.0
        case "everyone":
            return (domains - leaf) / (domains - 1)


@lru_cache(maxsize=4096)
def slowdown(traffic: Traffic, kind: str, share: float, oversubscription: float) -> float:
    """`share` of the cards' traffic goes up, where there is 1/oversubscription of their bandwidth: each path is asked for
    share x oversubscription of what it can carry on average, and the fullest one sets the pace.

    RoCE hashes whole flows onto paths: with `flows` a card, the fullest of n paths holds the expected maximum of n Poisson
    numbers of mean flows x share x oversubscription. InfiniBand's adaptive routing is balls into the emptier of two bins, whose
    fullest has log2(ln n) more than the mean (Azar, Broder, Karlin and Upfal, 1994).
    """
    asked = share * oversubscription
    if asked == 0:
        return 1.0
    if kind == "infiniband":
        return max(1.0, asked + math.log2(math.log(PATHS)) / PACKETS)
    flows = FLOWS_ALL_TO_ALL if traffic == "everyone" else FLOWS
    return max(1.0, fullest(PATHS, flows * asked) / flows)


def fullest(paths: int, mean: float) -> float:
    """E[max of n Poisson numbers] = sum over k >= 1 of 1 - P(X < k)^n."""
    expected, below, term, k = 0.0, 0.0, math.exp(-mean), 0
    while k < mean or 1 - below > 1e-12:
        below = min(1.0, below + term)  # P(X <= k)
        expected += 1 - below**paths
        k += 1
        term *= mean / k
        if k > mean + 40 * math.sqrt(mean) + 40:
            break
    return expected
