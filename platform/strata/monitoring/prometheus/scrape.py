"""What Prometheus scrapes, and what it keeps of it: one description, from which the laptop's configuration and a cluster's
monitors are written.

Ray alone can make hundreds of thousands of series (a histogram for each method of each process). Boards and alerts read a few
dozen names, and little more than those is kept; a name that they start to read belongs in a list here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from strata.monitoring.gpu.exporter import node_name
from strata.platform.errors import UserError

# Regular expressions, each for whole names.
RAY_KEPT = (
    "ray_strata_train_.*",
    "ray_node_cpu_(count|utilization)",
    "ray_node_mem_(total|used)",
    "ray_node_disk_utilization_percentage",
    "ray_node_network_(receive|send)_speed",
    "ray_node_gpus_utilization",
    "ray_node_gram_(available|used)",
    "ray_node_gpu_(power_milliwatts|temperature_celsius)",
    "ray_cluster_(active|failed|pending)_nodes",
    "ray_gcs_placement_group_count",
    "ray_internal_num_infeasible_scheduling_classes",
)
ENDPOINT_KEPT = ("strata_serve_.*",)  # vLLM's own series come with them, some thousand lines a replica
GPU_KEPT = ("strata_gpu_.*",)
DCGM_KEPT = (
    "DCGM_FI_DEV_(GPU_UTIL|FB_USED|FB_FREE|POWER_USAGE|GPU_TEMP|SM_CLOCK|XID_ERRORS|CLOCK_THROTTLE_REASONS|CLOCKS_EVENT_REASONS)",
)
KUBERAY_KEPT = ("kuberay_(cluster|job|service)_.*",)
ITSELF_KEPT = ("prometheus_tsdb_head_series", "prometheus_rule_evaluation_failures_total", "process_resident_memory_bytes")

# The same on every series of a process. (WorkerId is not: without it two workers' series would be one.)
RAY_DROPPED_LABELS = "otel_scope_.*|Version"

LOCAL_CLUSTER = "local"  # the label `cluster` of everything on this machine
GPU_EXPORTER_PORT = 9835


def whole(names: Sequence[str]) -> str:
    return "|".join(names)


@dataclass(frozen=True)
class Endpoint:
    """An endpoint's address as people write it, http://127.0.0.1:8000, and as Prometheus wants it."""

    scheme: str
    address: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        scheme, separator, rest = url.partition("://")
        address = rest.rstrip("/")
        if not separator or scheme not in ("http", "https") or not address or "/" in address:
            raise UserError(f"'{url}' is not the address of an endpoint.", "Write it as http://HOST:PORT, without a path.")
        return cls(scheme, address if ":" in address else f"{address}:{443 if scheme == 'https' else 80}")


def laptop(folder: Path, port: int, endpoints: Sequence[str], gpu_port: int) -> dict[str, Any]:
    """Prometheus's configuration on one machine. Ray clusters come and go, so that they are in a file which Prometheus watches;
    `folder` has it, and the rules."""
    parsed = [Endpoint.parse(url) for url in endpoints]
    return {
        # A run on a laptop may last a minute: it should be more than three points.
        "global": {"scrape_interval": "5s", "scrape_timeout": "4s", "evaluation_interval": "15s"},
        "rule_files": [str(folder / "rules" / "*.yaml")],
        "scrape_configs": [
            {
                "job_name": "strata-ray",
                "file_sd_configs": [{"files": [str(folder / "targets" / "ray.json")], "refresh_interval": "5s"}],
                "metric_relabel_configs": [_keep(RAY_KEPT), {"regex": RAY_DROPPED_LABELS, "action": "labeldrop"}],
            },
            *(
                {
                    "job_name": f"strata-endpoint-{scheme}",
                    "scheme": scheme,
                    "static_configs": [_target(addresses)],
                    "metric_relabel_configs": [_keep(ENDPOINT_KEPT)],
                }
                for scheme in ("http", "https")
                if (addresses := [endpoint.address for endpoint in parsed if endpoint.scheme == scheme])
            ),
            {
                "job_name": "strata-gpu",
                "static_configs": [_target([f"127.0.0.1:{gpu_port}"])],
                "metric_relabel_configs": [_keep(GPU_KEPT)],
            },
            {
                "job_name": "prometheus",
                "static_configs": [_target([f"127.0.0.1:{port}"])],
                "metric_relabel_configs": [_keep(ITSELF_KEPT)],
            },
        ],
    }


def _keep(names: Sequence[str]) -> dict[str, Any]:
    return {"source_labels": ["__name__"], "regex": whole(names), "action": "keep"}


def _target(addresses: Sequence[str], **labels: str) -> dict[str, Any]:
    return {"targets": list(addresses), "labels": {"cluster": LOCAL_CLUSTER, **labels}}


def ray_targets(temp_dir: Path) -> str:
    """The agents of all Ray clusters of ours that are up, in the format of Prometheus's file discovery.

    Ray writes such a file itself, but only with its dashboard, which our local clusters do without; and it stays behind when
    the cluster is gone. What every session has is a file with its agent's port. `node` is the GPU exporter's label for the same
    machine: rules bring the two together by it."""
    addresses = sorted(f"127.0.0.1:{port}" for session in temp_dir.glob("session_2*") for port in _agent_ports(session))
    return json.dumps([_target(addresses, node=node_name())] if addresses else [])


def _agent_ports(session: Path) -> list[int]:
    """Of a session whose process lives: its folder is named by the time and by the process that called `ray.init`, and Ray's
    processes end with that one. A later process with the same number was born after the folder."""
    try:
        starter = psutil.Process(int(session.name.rpartition("_")[2]))
        if starter.create_time() > session.stat().st_mtime:
            return []
        return [int(file.read_text()) for file in session.glob("metrics_export_port_*")]
    except (psutil.NoSuchProcess, FileNotFoundError, ValueError):  # gone, going, or still being written
        return []
