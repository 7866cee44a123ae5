"""Networks between GPU nodes, as components, and the levels of the clouds' network topologies.

The pods of a network are in its component's folder (`pods.py`). Sources (2026-11): the manifests and release notes of
github.com/GoogleCloudPlatform/container-engine-accelerators, github.com/AliyunContainerService/alibabacloud-erdma-controller,
github.com/Mellanox/k8s-rdma-shared-dev-plugin, and Google's guide to topology-aware scheduling.
"""

from dataclasses import dataclass

TCP = "tcp"  # deploy.network: several nodes without any of these


@dataclass(frozen=True)
class Network:
    """Network of some machine types. `machines` are beginnings of their names; empty for any machine.

    `engines`: engines use it too. NCCL plugins without RDMA are for training only: an engine is one pod, and NIXL moves KV blocks
    by UCX. `whole_nodes`: a node's interfaces belong to one pod. `resource` is what a pod requests from a device plugin, once or
    once for each GPU. `fabric` is its name in the planner's catalogue."""

    label: str
    targets: tuple[str, ...]
    machines: tuple[str, ...] = ()
    engines: bool = True
    whole_nodes: bool = False
    resource: str | None = None
    per_gpu: bool = False
    fabric: str | None = None

    def is_of(self, machine: str) -> bool:
        return not self.machines or machine.startswith(self.machines)


NETWORKS = {
    "network-gke-tcpx": Network(
        "GPUDirect-TCPX", ("gke",), ("a3-highgpu-8g",), engines=False, whole_nodes=True, fabric="gke-a3-high"
    ),
    "network-gke-tcpxo": Network(
        "GPUDirect-TCPXO", ("gke",), ("a3-megagpu-8g",), engines=False, whole_nodes=True, fabric="gke-a3-mega"
    ),
    "network-gke-rdma": Network(
        "GPUDirect RDMA", ("gke",), ("a3-ultragpu-8g", "a4-highgpu-8g"), whole_nodes=True, fabric="gke-a3-ultra"
    ),
    "network-ack-erdma": Network("eRDMA", ("ack",), ("ecs.gn8v", "ecs.gn8is"), resource="aliyun/erdma", fabric="ack-erdma"),
    # Any InfiniBand or RoCE. deploy.rdma_resource replaces the resource's name, which is the example of the device plugin; the
    # SR-IOV operator's resources are named by the cluster's administrator.
    "network-rdma": Network("RDMA", ("ack",), resource="rdma/hca_shared_devices_a"),
    "network-sriov": Network("RDMA by SR-IOV", ("ack",), resource="nvidia.com/sriov_rdma", per_gpu=True),
}
CHOSEN_BY_RECIPE = ("network-rdma", "network-sriov")
TOPOLOGY, COMPACT, FABRIC_CHECK = "topology", "compact", "fabric-check"

NO_PLUGIN = "GKE's own networks are the components network-gke-*, and kind has no second network"
ONLY_ON = {
    name: (network.targets, NO_PLUGIN if name in CHOSEN_BY_RECIPE else f"{network.label} is for {' and '.join(network.targets)}")
    for name, network in NETWORKS.items()
} | {
    TOPOLOGY: (("gke", "ack"), "kind has one node"),
    COMPACT: (("gke", "ack"), "kind has one node"),
}
EXCLUDE_EACH_OTHER = {
    tuple(NETWORKS): "a pod has one fast network",
    (TOPOLOGY, COMPACT): "Kueue has chosen the nodes before the scheduler could prefer some",
}

# Node labels from the widest to the narrowest part of a cloud's network. The last one is the node itself: only then does Kueue
# respect taints and replace a failed node. Nodes of GKE's A3 and A4 machines have the first three in reservations and with
# compact placement; elsewhere all that is known is the zone.
LEVELS = {
    "gke": (
        "cloud.google.com/gce-topology-block",
        "cloud.google.com/gce-topology-subblock",
        "cloud.google.com/gce-topology-host",
        "kubernetes.io/hostname",
    ),
    "ack": ("topology.kubernetes.io/zone", "kubernetes.io/hostname"),
}
# Level at which Kueue begins to look for a place for all pods of a run; it goes up from there.
NEAREST = {"gke": "cloud.google.com/gce-topology-subblock", "ack": "topology.kubernetes.io/zone"}


def of_machine(target: str, machine: str) -> list[str]:
    """Components for the network of a machine type, those for that machine first."""
    found = [name for name, network in NETWORKS.items() if target in network.targets and network.is_of(machine)]
    return sorted(found, key=lambda name: not NETWORKS[name].machines)
