"""GPUs and the network between them, by public figures. The figures themselves, with their sources, are in `catalogue/`."""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]

# FP8 products reach a little less of their peak than bf16 ones: 1,403 (H100) and 1,453 (H200) of 1,979 TFLOP/s against 795 of
# 989, all by the table "Maximum Achievable Matmul FLOPS" of github.com/stas00/ml-engineering (2026-08).
FP8_SHARE = 0.9


@dataclass(frozen=True)
class Gpu:
    """Rates are bytes or FLOP per second, dense (not sparse). `link` is what one GPU can send into its NVLink domain (or its
    like) while it receives as much; `reachable` the share of the matrix peak that the best products reach in a short test, and
    `sustained` the share of that which lasts through a long run."""

    name: str
    flops: dict[Precision, float]
    memory: float  # bytes
    bandwidth: float
    link: float
    domain: int  # GPUs that the link joins
    reachable: float
    sustained: float
    multicast: bool  # whether its switches add up while data pass (NVLS)
    pcie: float  # to the host, one direction
    dollars_per_hour: float  # of one GPU, on demand
    watts: float


@dataclass(frozen=True)
class Fabric:
    """Between NVLink domains. `nic` is the bytes a second of one network card, in each direction; a domain has `nics` of them.

    rail: card i of every domain hangs from switches of its own, so that peers of one rank never share a path with other ranks.
    fat-tree: any to any, over paths that are chosen by hashing.
    """

    name: str
    nic: float
    nics: int
    kind: Literal["infiniband", "roce"] = "infiniband"
    topology: Literal["rail", "fat-tree"] = "rail"
    oversubscription: float = 1.0  # how many times more comes into a leaf switch from below than it can pass on above
