"""Published failure rates of GPUs and their hosts in large fleets."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Interruptions of one GPU in an hour, by cause. `software` are the causes after which the same machines go on."""

    name: str
    source: str
    per_gpu_hour: dict[str, float]
    software: frozenset[str] = frozenset()

    @property
    def total(self) -> float:
        return math.fsum(self.per_gpu_hour.values())

    @property
    def hardware(self) -> float:
        return math.fsum(rate for cause, rate in self.per_gpu_hour.items() if cause not in self.software)


# The Llama 3 Herd of Models, arXiv 2407.21783, table 5: the 419 unexpected interruptions of 54 days on 16,384 H100.
LLAMA3_COUNTS = {
    "faulty GPU": 148,
    "GPU HBM3 memory": 72,
    "software bug": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM": 19,
    "GPU system processor": 17,
    "network card": 7,
    "NCCL watchdog timeout": 7,
    "silent data corruption": 6,
    "GPU thermal interface and sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
# Revisiting Reliability in Large-Scale ML Research Clusters, arXiv 2410.21680: failures per 1,000 days of an 8-GPU A100 node,
# from which it projects 1.8 h for 16,384 GPUs; and apart from that the 7.9 h that jobs of 1,024 GPUs were seen to live on
# RSC-1, which is 3.6 times as often.
NODE_DAYS = 1000 * 24 * 8
FLEETS: dict[str, Rates] = {
    rates.name: rates
    for rates in (
        Rates(
            "llama3",
            "Llama 3 405B, 16,384 H100, 2024",
            {cause: count / (54 * 24 * 16384) for cause, count in LLAMA3_COUNTS.items()},
            frozenset({"software bug", "NCCL watchdog timeout", "dependency"}),
        ),
        Rates("rsc-1", "Meta RSC-1, 16,000 A100: 6.5 failures in 1,000 node-days", {"any": 6.5 / NODE_DAYS}),
        Rates("rsc-1-jobs", "Meta RSC-1, jobs of 1,024 A100: one failure in 7.9 h", {"any": 1 / (7.9 * 1024)}),
        Rates("rsc-2", "Meta RSC-2, 8,000 A100: 2.34 failures in 1,000 node-days", {"any": 2.34 / NODE_DAYS}),
    )
}
