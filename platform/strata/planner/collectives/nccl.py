"""Constants of NCCL's algorithms and protocols, and measured shares of line rate.

From github.com/NVIDIA/nccl, commit 5067397: the tables of its tuner (`src/graph/tuning.cc`), its chunk sizes (`src/enqueue.cc`,
`src/init.cc`, `src/transport/nvls.cc`) and its link rates (`src/graph/topo.h`). Measured shares: NVIDIA's GTC sessions S62129
(2024) and S72583 (2025), and github.com/stas00/ml-engineering.

Four constants were fitted to measured curves: LAUNCH and NVLS_HANDSHAKE (8 x H200, 8 x H100), PLATEAU inside a node and LL128's
share inside a node (8 x A100). Each has a physical reason and one value for all GPUs.
"""

from typing import Literal

Protocol = Literal["LL", "LL128", "Simple"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

US = 1e-6
KIB = 2.0**10
GB = 1e9

# Seconds before the first byte moves (`baseLatencies`).
BASE: dict[str, dict[Protocol, float]] = {
    "ring": {"LL": 6.6 * US, "LL128": 14.0 * US, "Simple": 8.4 * US},
    "tree": {"LL": 6.8 * US, "LL128": 14.0 * US, "Simple": 8.4 * US},
    "nvls": {"Simple": 0.0},  # included in its single hop
    "pat": {"Simple": 8.0 * US},
}
# Seconds of one hop over NVLink and over the network (`hwLatencies`).
HOP_INSIDE: dict[str, dict[Protocol, float]] = {
    "ring": {"LL": 0.6 * US, "LL128": 1.9 * US, "Simple": 3.4 * US},
    "tree": {"LL": 0.6 * US, "LL128": 1.25 * US, "Simple": 4.0 * US},
    "nvls": {"Simple": 25.0 * US},
    "pat": {"Simple": 4.0 * US},
}
HOP_OUTSIDE: dict[str, dict[Protocol, float]] = {
    "ring": {"LL": 2.7 * US, "LL128": 4.0 * US, "Simple": 14.0 * US},
    "tree": {"LL": 5.0 * US, "LL128": 8.5 * US, "Simple": 14.0 * US},
    "nvls": {"Simple": 20.9 * US},
    "pat": {"Simple": 14.0 * US / 3.5},
}
# A ring over several domains posts every hop to the network: minimum time of a hop (`getNetOverhead`, tripled for Simple).
POST: dict[Protocol, float] = {"LL": 1.0 * US, "LL128": 1.0 * US, "Simple": 3.0 * US}
# In Simple the hops of an all-reduce wait for each other ("plateau effect of ring"). NCCL applies the factor between nodes only.
# Inside a node, 8 x A100 take 30 to 50 us more than without it at 32 and 64 MiB; the factor explains half of that.
PLATEAU = 1.4
# Linear part of PAT's time, per rank ("still a linear part").
PAT_RANK = 2.8 * US

# Share of a link's line rate that copies reach. NCCL uses 20 of a link's 25 GB/s (Volta, Ampere), 20.6 (Hopper) and 40.1 of
# 50 (Blackwell). Measured for a ring: 122 of 150 GB/s (V100), 232 to 235 of 300 (A100), 368 of 450 (H100, H200), 682 to 700 of
# 900 (B200). The rest is headers and flow control.
LINK = 0.80
# Eight or more concurrent streams reach less. Measured for all-to-all: 210 of 300 (A100), 320 of 450 (H100), 640 of 900 (B200).
LINK_ALL_TO_ALL = 0.71
# In-switch reduction reaches 0.85 (Hopper) and 0.74 (Blackwell) of the rate of copies (`nvlsEfficiency`), on top of NCCL's
# 20.6/25 and 40.1/50. Measured for an all-reduce: 414, 436, 460, 473 GB/s on 5 to 8 H200 and 778, 811, 838 on 6 to 8 B200.
NVLS_HOPPER = 0.85 * 20.6 / 25
NVLS_BLACKWELL = 0.74 * 40.1 / 50
HOPPER_LINK = 450e9
# With a tree over the network, two nodes reach 8 channels of 57.7 GB/s (`perChMaxNVLSTreeBws`), out of 525 for 16 ranks at
# NVLS_HOPPER.
NVLS_TREE = 8 * 57.7 / 525
# Up to four ranks a ring is as fast, and NCCL chooses it. NVIDIA's partition guide for GB200 has the same limit for multicast.
NVLS_RANKS = 5
# Share of a network card's line rate: 24 of 25 GB/s, 48 of 50, and 192 of 200 for the eight cards of a DGX A100. InfiniBand and
# RoCE are equal where no paths collide.
CARD = 0.96

# Share of a ring's rate by protocol. LL sends a flag with every 4 bytes, so at most half; `llMaxBws` is lower (87.7 of 240 GB/s,
# 141 of 371, 282 of 722). LL128 sends 120 of 128 bytes, for which NCCL uses 0.92. Inside a node NCCL uses 7/9 for trees, and
# rings measure the same.
RING_SHARE: dict[Protocol, float] = {"LL": 0.38, "LL128": 7 / 9, "Simple": 1.0}
RING_SHARE_OUTSIDE: dict[Protocol, float] = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}
# A tree's ranks read from three neighbours and write to three: 0.92, and 0.85 of that where the tree is not balanced. The limit
# per channel (`perChMaxTreeBws`, 8 x 23.6 of 240 GB/s on two nodes of A100) is the same.
TREE = 0.92 * 0.85
TREE_SHARE: dict[Protocol, float] = {"LL": TREE / 3.8, "LL128": TREE * 7 / 9, "Simple": TREE}
TREE_SHARE_OUTSIDE: dict[Protocol, float] = {"LL": 0.92 / 3.8, "LL128": 0.92 * 120 / 128, "Simple": 0.92}
PAT_SHARE = 0.75
# LL is polled by the network proxy on the CPU: bytes per second out of one domain, for two and for more domains (`llMaxBws`).
LL_TWO_DOMAINS = 39.0 * GB
LL_MORE_DOMAINS = 20.4 * GB

# A buffer passes a tree or a switch in rounds of one chunk per channel, with 16 channels. A chunk is an eighth of the protocol's
# buffer in LL and Simple; in LL128 it is halved until there are enough chunks.
CHANNELS = 16
CHUNK: dict[Protocol, float] = {"LL": 32 * KIB, "LL128": 64 * KIB, "Simple": 512 * KIB}
# NVLS has one chunk per channel and rank in flight. The chunk size is chosen for about 8 rounds, within these limits. With a
# tree over the network the chunk size is fixed.
NVLS_CHUNK_LEAST = 16 * KIB
NVLS_CHUNK_MOST = 128 * KIB
NVLS_ROUNDS = 8
NVLS_TREE_CHUNK = 64 * KIB
# The ranks synchronize twice per round: all operands are present, and all buffers for the sums are free. Each is a flag to the
# switch and one back, both a hop of LL.
NVLS_HANDSHAKE = 2 * 2 * 0.6 * US
# Peers that a rank exchanges with concurrently (`NCCL_MAX_DEV_WORK_P2P_PER_BATCH`).
CONCURRENT_PEERS = 8

# From a host's call to the kernel's start on every rank, where the host waits for each call as a benchmark does: torch's
# dispatch, an event between two streams, the launch. 8 H200 take 40 us for 32 KiB and 8 B200 take 48, while NCCL's constants
# above sum to 15. In a training step the host runs ahead of the GPU and hides it.
LAUNCH = 20 * US
