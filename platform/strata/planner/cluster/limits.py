"""Limits and rates of control planes and monitoring for `strata plan cluster`, each with its source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`source` ends up in `--explain`."""

    value: float
    source: str


# Ray. Its scalability envelope (release/benchmarks/README.md) has grown from 250 nodes and 10,000 actors to 3,000 and 20,000; its
# release tests schedule gangs on 2,000 nodes (ray-project/ray 64446).
RAY_NODES = Figure(2_000, "nodes of a Ray cluster: size of Ray's release tests; its scalability envelope has 3,000")
RAY_ACTORS = Figure(20_000, "actors of a Ray cluster: Ray's scalability envelope")
ACTORS_PER_GPU = Figure(1, "a training worker per GPU")
HEAD_CPUS = Figure(8, "head of a small cluster: Ray's best practices for large clusters")
HEAD_BYTES = Figure(32e9, "head of a small cluster: Ray's best practices for large clusters")
LARGE_HEAD_CPUS = Figure(64, "head of a cluster at the limit: m5.16xlarge, as in Ray's envelope")
LARGE_HEAD_BYTES = Figure(256e9, "head of a cluster at the limit: m5.16xlarge, as in Ray's envelope")

# Kubernetes: kubernetes.io/docs/setup/best-practices/cluster-large, and the kubelet's default lease renewal.
KUBERNETES_NODES = Figure(5_000, "nodes of a Kubernetes cluster: considerations for large clusters; some clouds allow more")
LEASE_S = Figure(10, "seconds between renewals of a node's lease: the kubelet's default")

# Series, as counted in docs/monitoring.md.
SERIES_PER_GPU = Figure(80, "both exporters and the rules")
SERIES_PER_NODE = Figure(19, "of Ray's node metrics, those that the scrape retains")
SERIES_PER_RUN = Figure(20, "training metrics of a run")

# Prometheus.
SERIES_PER_SHARD = Figure(1.5e6, "an assumption: the boards are made for 16,384 GPUs, 1.35 million series")
BYTES_PER_SERIES = Figure(
    2 * (732 + 12 * 32 + 2 * 40), "732 B and 32 B per label, twice the name, doubled for Go's collector (Robust Perception, 2019)"
)
REMOTE_WRITE_MEMORY = Figure(1.25, "prometheus.io, remote write tuning: most users report about 25% more memory")
QUERY_MEMORY = Figure(2, "an assumption: as much again for queries, rules and compaction")
BYTES_PER_SAMPLE = Figure(2, "prometheus.io, storage: 1 to 2 bytes")
WAL_BYTES_PER_SAMPLE = Figure(6.5, "13 bytes, halved by compression (Robust Perception, 2020)")
WAL_S = Figure(3 * 3600, "samples that are not yet in a block: up to one and a half blocks of 2 h")
SAMPLES_PER_SEND = Figure(2_000, "Prometheus's default max_samples_per_send")
SEND_S = Figure(0.1, "an assumption: seconds of one remote-write request")
