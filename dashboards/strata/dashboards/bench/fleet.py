"""A simulated fleet: nodes of eight GPUs in Ray clusters of several teams, with their series.

Series have the names and labels that Prometheus stores after the scrape's allowlists: DCGM and Ray on every node, a training run
per Ray cluster, and an endpoint. Values are random around a mean; their size does not matter.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from strata.dashboards import series
from strata.monitoring.prometheus import scrape
from strata.platform import metrics
from strata.platform.errors import UserError
from strata.platform.metrics import Metric, ServeMetric

COUNTERS = Path(__file__).parents[4] / "infra" / "components" / "dcgm" / "counters.csv"
GPUS_PER_NODE = 8
NODES_PER_RAY_CLUSTER = 64
RAY_CLUSTERS_PER_TEAM = 2
FREE_EVERY, SERVING_EVERY = 48, 64  # one in so many nodes
METRICS = {  # of a serving node, by role
    "gateway": metrics.SERVING_GATEWAY,
    "decode": metrics.SERVING_ENGINE,
    "prefill": metrics.SERVING_ENGINE,
    "pictures": metrics.SERVING_PICTURES,
}
CLUSTER = "fleet"
SERVING_POD = f'cluster="{CLUSTER}",namespace="serving",ray_io_cluster="serve"'
MODEL = "NVIDIA H200"
SCRAPE_S = 15
HOUR_S = 3600

# Means of DCGM's values; fields without one are 0, as error counters of a healthy card are.
DCGM_MEANS = {
    "GPU_UTIL": 90.0,
    "FB_USED": 120_000.0,
    "FB_FREE": 23_000.0,
    "POWER_USAGE": 600.0,
    "GPU_TEMP": 62.0,
    "SM_CLOCK": 1800.0,
}
RAY_NODE_MEANS = {
    "ray_node_cpu_utilization": 40.0,
    "ray_node_cpu_count": 192.0,
    "ray_node_mem_used": 8e11,
    "ray_node_mem_total": 2e12,
    "ray_node_disk_utilization_percentage": 55.0,
    "ray_node_network_receive_speed": 1e9,
    "ray_node_network_send_speed": 1e9,
    "ray_object_store_used_memory": 1e10,
    "ray_object_store_available_memory": 9e10,
}
RAY_GPU_MEANS = {
    "ray_node_gpus_utilization": 90.0,
    "ray_node_gram_used": 120_000.0,
    "ray_node_gram_available": 23_000.0,
    "ray_node_gpu_power_milliwatts": 600_000.0,
    "ray_node_gpu_temperature_celsius": 62.0,
}
# Recording rules by node, and by team, with a mean. The rules make the same series from the start on.
NODE_RULES = {
    "strata:node_gpus:count": 8.0,
    "strata:node_gpu_utilization:avg": 0.9,
    "strata:node_gpu_utilization:sum": 7.2,
    "strata:node_gpu_memory_used:bytes": 9e11,
    "strata:node_gpu_memory_total:bytes": 1.2e12,
    "strata:node_gpu_power:watts": 4800.0,
    "strata:node_gpu_temperature:max": 65.0,
    "strata:node_gpu_sm_clock:min": 1.8e9,
}
RAY_NODE_RULES = {"strata:node_cpu:percent": 40.0, "strata:node_memory:ratio": 0.4, "strata:node_disk:percent": 55.0}
TEAM_RULES = {
    "strata:team_gpus:count": 512.0,
    "strata:team_gpus_idle:count": 10.0,
    "strata:team_power:watts": 3e5,
    "strata:team_gpu_hours:sum5m": 42.0,
    "strata:team_idle_gpu_hours:sum5m": 0.8,
    "strata:team_energy_kwh:sum5m": 25.0,
    "strata:team_cost_dollars:sum5m": 160.0,
    "strata:team_idle_cost_dollars:sum5m": 3.0,
    "strata:team_cost:dollars_per_hour": 2000.0,
    "strata:team_idle_cost:dollars_per_hour": 40.0,
}
BUCKET_RULES = {"strata:gpu_utilization:bucket": ("0.05", "0.25", "0.5", "0.75", "0.9", "+Inf")}
BUCKET_RULES["strata:gpu_temperature:bucket"] = ("50", "60", "70", "80", "88", "+Inf")
OBJECTIVES = tuple(misses[window].exported for misses in series.OBJECTIVES for window in series.WINDOWS)
# Values of the labels that only some metrics have.
VALUES = {
    "route": ("/v1/completions",),
    "status": ("200", "429", "500"),
    "reason": ("short", "queue-full"),
    "outcome": ("continued",),
    "where": ("local", "remote"),
    "beside": ("decode", "prefill"),
    "phase": ("data", "forward", "backward", "optimizer", "checkpoint"),
}


@dataclass(frozen=True)
class Node:
    number: int
    team: str  # empty for a free node
    ray_cluster: str
    is_head: bool

    @property
    def name(self) -> str:
        return f"node-{self.number:05d}"

    @property
    def pod(self) -> str:
        """Labels of a Ray pod, and of what the rules make from it."""
        owner = f',namespace="{self.team}",ray_io_cluster="{self.ray_cluster}"' if self.team else ""
        return f'cluster="{CLUSTER}"{owner}'


@dataclass(frozen=True)
class Series:
    """A series as the text formats write it, and its values: around `mean`, or growing by `mean` a second."""

    text: str  # name and labels
    mean: float
    grows: bool = False

    def value(self, seconds: float, rng: random.Random) -> float:
        return self.mean * seconds if self.grows else self.mean * (0.95 + 0.1 * rng.random())


class Fleet:
    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._node(number) for number in range(-(-self.gpus // GPUS_PER_NODE)))

    def _node(self, number: int) -> Node:
        place = number // NODES_PER_RAY_CLUSTER
        is_head = number % NODES_PER_RAY_CLUSTER == 0
        if not is_head and number % FREE_EVERY == FREE_EVERY - 1:
            return Node(number, "", "", False)
        return Node(number, f"team-{place // RAY_CLUSTERS_PER_TEAM:02d}", f"train-{place:03d}", is_head)

    @cached_property
    def owners(self) -> tuple[Node, ...]:
        """One node for each Ray cluster, the free nodes as one."""
        return tuple({node.ray_cluster: node for node in self.nodes}.values())

    def gpus_of(self, node: Node) -> range:
        return range(min(GPUS_PER_NODE, self.gpus - node.number * GPUS_PER_NODE))

    # Scraped series

    def dcgm(self, node: Node) -> Iterator[Series]:
        for gpu in self.gpus_of(node):
            uuid = f"GPU-{node.number:05d}-{gpu}"
            labels = f'cluster="{CLUSTER}",Hostname="{node.name}",gpu="{gpu}",UUID="{uuid}",modelName="{MODEL}"'
            for name in dcgm_names():
                yield Series(f"{name}{{{labels}}}", DCGM_MEANS.get(name.removeprefix("DCGM_FI_DEV_"), 0.0))

    def processes(self, node: Node) -> Iterator[Series]:
        """Processes on the GPUs, which Strata's exporter reports beside DCGM."""
        if node.team:
            for gpu in self.gpus_of(node):
                process = f'pid="{1000 + gpu}",actor="RayTrainWorker"'
                labels = f'cluster="{CLUSTER}",node="{node.name}",gpu="{gpu}",name="{MODEL}",{process}'
                for metric, mean in ((metrics.GPU_PROCESS_MEMORY, 1.2e11), (metrics.GPU_PROCESS_UTILIZATION, 0.9)):
                    yield Series(f"{metric.exported}{{{labels}}}", mean)

    def ray_node(self, node: Node) -> Iterator[Series]:
        if node.team:
            labels = _ray_labels(node)
            for name, mean in RAY_NODE_MEANS.items():
                yield Series(f"{name}{{{labels}}}", mean)

    def containers(self, node: Node) -> Iterator[Series]:
        """kube-state-metrics of the node's Ray pod."""
        if node.team:
            container = f'container="ray-{"head" if node.is_head else "worker"}"'
            yield Series(f'kube_pod_container_status_restarts_total{{namespace="{node.team}",{_pod(node)},{container}}}', 0.0)

    def ray_gpus(self, node: Node) -> Iterator[Series]:
        if node.team:
            for gpu in self.gpus_of(node):
                card = f'GpuIndex="{gpu}",GpuDeviceName="{MODEL}",GpuUuid="GPU-{node.number:05d}-{gpu}"'
                labels = _ray_labels(node)
                for name, mean in RAY_GPU_MEANS.items():
                    yield Series(f"{name}{{{labels},{card}}}", mean)
                rank = f'run="{node.ray_cluster}",rank="{node.number * GPUS_PER_NODE + gpu}",stage="0"'
                yield Series(f"{metrics.TRAIN_RANK_SECONDS.exported}{{{labels},{rank}}}", 0.5)

    def training(self) -> Iterator[Series]:
        for node in self.nodes:
            if node.is_head:
                for metric in metrics.TRAINING:
                    if metric != metrics.TRAIN_RANK_SECONDS:  # of every worker: `ray_gpus`
                        yield from _series(metric, f'{node.pod},run="{node.ray_cluster}"')

    def on_call(self) -> Iterator[Series]:
        """Series of the endpoint that the on-call board reads."""
        yield from self._endpoint(lambda metric: metric in ON_CALL)

    def serving(self) -> Iterator[Series]:
        """All others."""
        yield from self._endpoint(lambda metric: metric not in ON_CALL)

    def _endpoint(self, wanted: Callable[[Metric], bool]) -> Iterator[Series]:
        """A gateway, two engines and a picture replica on every serving node."""
        for node in self.nodes[::SERVING_EVERY]:
            for role, own in METRICS.items():
                labels = f'{SERVING_POD},model="large",role="{role}",replica="{role}-{node.number}"'
                for metric in (metrics.SERVE_REPLICAS, *own):
                    if wanted(metric):
                        yield from _series(metric, labels)

    # Series of recording rules, for the time before the start

    def utilization(self) -> Iterator[Series]:
        for node in self.nodes:
            for gpu in self.gpus_of(node):
                labels = f'{node.pod},node="{node.name}",gpu="{gpu}",name="{MODEL}"'
                yield Series(f"strata:gpu:utilization{{{labels}}}", 0.9)

    def node_rules(self) -> Iterator[Series]:
        for node in self.nodes:
            for name, mean in NODE_RULES.items():
                yield Series(f'{name}{{{node.pod},node="{node.name}"}}', mean)
            for name, mean in RAY_NODE_RULES.items() if node.team else ():
                yield Series(f'{name}{{{node.pod},node="{node.name}",ip="{_ip(node)}"}}', mean)
        for owner in self.owners:
            for name, bounds in BUCKET_RULES.items():
                for number, bound in enumerate(bounds):
                    yield Series(f'{name}{{{owner.pod},le="{bound}"}}', 100.0 * number)
            for reason in ("power", "thermal", "hardware"):
                yield Series(f'strata:gpus_throttled:count{{{owner.pod},reason="{reason}"}}', 1.0)

    def team_rules(self) -> Iterator[Series]:
        for owner in self.owners:
            for name, mean in TEAM_RULES.items():
                yield Series(f'{name}{{{owner.pod},name="{MODEL}"}}', mean)

    def objectives(self) -> Iterator[Series]:
        for name in OBJECTIVES:
            yield Series(f'{name}{{{SERVING_POD},model="large"}}', 0.005)


ON_CALL = frozenset(
    {
        metrics.SERVE_REPLICAS,
        metrics.SERVE_REQUESTS,
        metrics.SERVE_FIRST_TOKEN,
        metrics.SERVE_INTER_TOKEN,
        metrics.SERVE_KV_USAGE,
    }
)


@cache
def dcgm_names() -> list[str]:
    """Names of the exporter's counters file that the scrape stores."""
    if not COUNTERS.is_file():
        raise UserError(
            "The counters of the DCGM exporter do not exist in an installed package.", "Run this command in a checkout."
        )
    names = [line.split(",")[0].strip() for line in COUNTERS.read_text().splitlines()]
    return [name for name in names if re.fullmatch(scrape.whole(scrape.DCGM_SERIES), name)]


def _ray_labels(node: Node) -> str:
    kind = f'IsHeadNode="{str(node.is_head).lower()}",RayNodeType="{"head" if node.is_head else "worker"}"'
    return f'{node.pod},{_pod(node)},node="{node.name}",ip="{_ip(node)}",{kind},SessionName="session-{node.ray_cluster}"'


def _ip(node: Node) -> str:
    return f"10.{node.number >> 16}.{node.number >> 8 & 255}.{node.number & 255}"


def _pod(node: Node) -> str:
    return f'pod="{node.ray_cluster}-worker-{node.number}"'


def _series(metric: Metric, labels: str) -> Iterator[Series]:
    """Series of a metric with every combination of the labels that are not yet set."""
    sets = [labels]
    for label in metric.labels:
        if label in VALUES:
            sets = [f'{each},{label}="{value}"' for each in sets for value in VALUES[label]]
    for each in sets:
        if isinstance(metric, ServeMetric) and metric.kind == "histogram":
            bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
            for number, bound in enumerate(bounds, start=1):
                yield Series(f'{metric.exported}_bucket{{{each},le="{bound}"}}', 100.0 * number / len(bounds), grows=True)
            yield Series(f"{metric.exported}_sum{{{each}}}", 10.0, grows=True)
            yield Series(f"{metric.exported}_count{{{each}}}", 100.0, grows=True)
        else:
            yield Series(f"{metric.exported}{{{each}}}", _mean(metric), grows=metric.kind == "counter")


def _mean(metric: Metric) -> float:
    """Shares are between 0 and 1; of two metrics, the panels show the ratio."""
    return {metrics.TRAIN_STEPS_PLANNED: 100_000.0, metrics.SERVE_KV_USAGE: 0.6, metrics.TRAIN_MFU: 0.4}.get(metric, 10.0)
