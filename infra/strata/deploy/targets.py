"""Deployment targets, with their machine types and the node labels of their GPUs."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.platform.errors import UserError

MACHINE_LABEL = "node.kubernetes.io/instance-type"
RESERVATION_LABEL = "cloud.google.com/reservation-name"


@dataclass(frozen=True)
class Machine:
    name: str
    gpus: int
    cpus: int
    memory_gib: int


@dataclass(frozen=True)
class GpuType:
    """GPU model of a target. `label` is the value of the target's GPU label on nodes, None if it has no such label."""

    label: str | None
    machines: tuple[Machine, ...]


@dataclass(frozen=True)
class Target:
    """Deployment target. `storage` describes what `deploy.storage` names; None if the overlay has its own storage. A target
    without `gpus` has only CPUs. `spot_grace_s` is the part of the notice of a spot node's end that a pod may use; None if the
    component's is right."""

    name: str
    storage: str | None = None
    gpu_label: str | None = None
    gpus: Mapping[str, GpuType] = field(default_factory=dict)
    spot_grace_s: int | None = None

    def selector(self, gpu: GpuType, machine: Machine) -> dict[str, str]:
        by_machine = {MACHINE_LABEL: machine.name}
        return by_machine | {self.gpu_label: gpu.label} if self.gpu_label and gpu.label else by_machine


# GPUs, vCPUs and GiB from the clouds' documentation (2026-11), one machine per number of GPUs, in ascending order. For other
# machines, change the node selectors in the rendered manifests.
TARGETS = {
    "gke": Target(
        "gke",
        storage="the Cloud Storage bucket",
        gpu_label="cloud.google.com/gke-accelerator",
        gpus={
            "l4": GpuType(
                "nvidia-l4",
                (
                    Machine("g2-standard-12", 1, 12, 48),
                    Machine("g2-standard-24", 2, 24, 96),
                    Machine("g2-standard-48", 4, 48, 192),
                    Machine("g2-standard-96", 8, 96, 384),
                ),
            ),
            "a100-40gb": GpuType(
                "nvidia-tesla-a100",
                (
                    Machine("a2-highgpu-1g", 1, 12, 85),
                    Machine("a2-highgpu-2g", 2, 24, 170),
                    Machine("a2-highgpu-4g", 4, 48, 340),
                    Machine("a2-highgpu-8g", 8, 96, 680),
                ),
            ),
            "a100": GpuType(
                "nvidia-a100-80gb",
                (
                    Machine("a2-ultragpu-1g", 1, 12, 170),
                    Machine("a2-ultragpu-2g", 2, 24, 340),
                    Machine("a2-ultragpu-4g", 4, 48, 680),
                    Machine("a2-ultragpu-8g", 8, 96, 1360),
                ),
            ),
            "h100": GpuType(
                "nvidia-h100-80gb",
                (
                    Machine("a3-highgpu-1g", 1, 26, 234),
                    Machine("a3-highgpu-2g", 2, 52, 468),
                    Machine("a3-highgpu-4g", 4, 104, 936),
                    Machine("a3-highgpu-8g", 8, 208, 1872),
                ),
            ),
            "h100-mega": GpuType("nvidia-h100-mega-80gb", (Machine("a3-megagpu-8g", 8, 208, 1872),)),
            "h200": GpuType("nvidia-h200-141gb", (Machine("a3-ultragpu-8g", 8, 224, 2952),)),
            "b200": GpuType("nvidia-b200", (Machine("a4-highgpu-8g", 8, 224, 3968),)),
        },
    ),
    # ACK labels nodes with the driver's name of the GPU, which depends on the driver version; the instance type does not.
    "ack": Target(
        "ack",
        storage="the NAS or CPFS mount target",
        spot_grace_s=120,  # of a notice of 5 minutes, during which the node is drained
        gpus={
            "a10": GpuType(
                None,
                (
                    Machine("ecs.gn7i-c32g1.8xlarge", 1, 32, 188),
                    Machine("ecs.gn7i-c32g1.16xlarge", 2, 64, 376),
                    Machine("ecs.gn7i-c32g1.32xlarge", 4, 128, 752),
                    Machine("ecs.gn7i-8x.32xlarge", 8, 128, 512),
                ),
            ),
            "l20": GpuType(
                None,
                (
                    Machine("ecs.gn8is.4xlarge", 1, 16, 128),
                    Machine("ecs.gn8is-2x.8xlarge", 2, 32, 256),
                    Machine("ecs.gn8is-4x.16xlarge", 4, 64, 512),
                    Machine("ecs.gn8is-8x.32xlarge", 8, 128, 1024),
                ),
            ),
            "a100": GpuType(
                None,
                (
                    Machine("ecs.gn7e-c16g1.4xlarge", 1, 16, 125),
                    Machine("ecs.gn7e-c16g1.8xlarge", 2, 32, 250),
                    Machine("ecs.gn7e-c16g1.16xlarge", 4, 64, 500),
                    Machine("ecs.gn7e-c16g1.32xlarge", 8, 128, 1000),
                ),
            ),
            "h20": GpuType(
                None,
                (
                    Machine("ecs.gn8v.6xlarge", 1, 24, 128),
                    Machine("ecs.gn8v-2x.12xlarge", 2, 48, 256),
                    Machine("ecs.gn8v-4x.24xlarge", 4, 96, 512),
                    Machine("ecs.gn8v-8x.48xlarge", 8, 192, 1024),
                ),
            ),
            "rtx-pro-5000": GpuType(
                None,
                (
                    Machine("ecs.gn9gc.8xlarge", 1, 32, 192),
                    Machine("ecs.gn9gc-2x.16xlarge", 2, 64, 384),
                    Machine("ecs.gn9gc-4x.32xlarge", 4, 128, 768),
                    Machine("ecs.gn9gc-8x.64xlarge", 8, 256, 1536),
                ),
            ),
        },
    ),
    "kind": Target("kind"),
}


def find(name: str) -> Target:
    if name in TARGETS:
        return TARGETS[name]
    near = difflib.get_close_matches(name, TARGETS, n=1)
    raise UserError(
        f"There is no target '{name}'.", (f"Did you mean '{near[0]}'? " if near else "") + f"Targets: {', '.join(TARGETS)}."
    )


# Node labels that manifests may select by, and that a recipe overrides.
SELECTORS = {MACHINE_LABEL, *(target.gpu_label for target in TARGETS.values() if target.gpu_label)}
