"""Network congestion above the leaf switches: oversubscribed uplinks, and flows hashed onto the same path.

A slowdown is the time of the traffic over its time at the rate of the network cards. It never falls as oversubscription rises.
"""

import math
from functools import lru_cache
from typing import Literal

# Half of the ports of a 25.6 Tb/s switch (Quantum-2, Tomahawk 4; the largest of the H100's years) are downlinks: 32 ports of
# 400 Gb/s. The model has 32 uplinks at any oversubscription and lowers their rate.
LEAF_BANDWIDTH = 32 * 50e9
PATHS = 32

# Concurrent flows of one card. NCCL uses 2 channels per card and 2 connections per channel. In an all-to-all a rank sends to 8
# peers concurrently.
FLOWS = 4
FLOWS_ALL_TO_ALL = 8 * FLOWS
# InfiniBand switches choose a less loaded port for every packet. The balls of the balls-into-bins model are the packets that a
# card has in flight: 50 GB/s for 10 us in packets of 4 KiB.
PACKETS = 120

Traffic = Literal["neighbours", "far", "everyone"]


def crossing(traffic: Traffic, topology: str, domains: int, inside: int, domain_bandwidth: float) -> float:
    """Share of a domain's network traffic that leaves its leaf switch.

    Rings and trees follow the order of the domains, so only one domain of a leaf has its neighbour under another leaf. In a
    rail-optimized network a rank's peers are on its own rail; only an all-to-all sends from one rail to another.
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
    """Slowdown of traffic of which `share` leaves the leaf switch.

    The uplinks have 1/oversubscription of the cards' bandwidth, so the mean load of a path is share x oversubscription. The most
    loaded path sets the pace.

    RoCE hashes whole flows onto paths: with `flows` per card, the load of the fullest of n paths is the expected maximum of n
    Poisson numbers of mean flows x share x oversubscription. InfiniBand's adaptive routing places each ball into the emptier of
    two bins; the fullest bin has log2(ln n) more than the mean (Azar, Broder, Karlin and Upfal, 1994).
    """
    load = share * oversubscription
    if load == 0:
        return 1.0
    if kind == "infiniband":
        return max(1.0, load + math.log2(math.log(PATHS)) / PACKETS)
    flows = FLOWS_ALL_TO_ALL if traffic == "everyone" else FLOWS
    return max(1.0, expected_maximum(PATHS, flows * load) / flows)


def expected_maximum(paths: int, mean: float) -> float:
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
