"""Specifications of GPUs and of the networks between them. The figures are in `gpus.yaml` and `fabrics.yaml`."""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]

# FP8 products reach a little less of their peak than bf16 products: 1,403 (H100) and 1,453 (H200) of 1,979 TFLOP/s against 795 of
# 989, all by the table "Maximum Achievable Matmul FLOPS" of github.com/stas00/ml-engineering (2026-08).
FP8_SHARE = 0.9


@dataclass(frozen=True)
class Device:
    """Peak rates of a card. `device` is a regular expression for the name that the driver reports
    (`torch.cuda.get_device_name`). `flops` are in FLOP/s, dense (not sparse); precisions without hardware are absent."""

    name: str
    device: str
    flops: dict[Precision, float]


@dataclass(frozen=True)
class Gpu(Device):
    """A card with the figures to plan with. Rates are bytes per second. `link` is the rate at which one GPU sends into its NVLink
    domain (or equivalent) while it receives as much. `reachable` is the share of the matrix peak that the best products reach in
    a short test, `sustained` the share of that which lasts through a long run."""

    memory: float  # bytes
    bandwidth: float
    link: float
    domain: int  # GPUs that the link joins
    reachable: float
    sustained: float
    multicast: bool  # whether its switches reduce data in transit (NVLS)
    pcie: float  # to the host, one direction
    dollars_per_hour: float  # per GPU, on demand
    watts: float


@dataclass(frozen=True)
class Fabric:
    """Network between NVLink domains. `nic` is the bytes per second of one network card, in each direction; a domain has `nics`.

    rail: card i of every domain has switches of its own, so peers of one rank never share a path with other ranks.
    fat-tree: any to any, over paths that are chosen by hashing.
    """

    name: str
    nic: float
    nics: int
    kind: Literal["infiniband", "roce"] = "infiniband"
    topology: Literal["rail", "fat-tree"] = "rail"
    oversubscription: float = 1.0  # bandwidth into a leaf switch from below over its bandwidth above
