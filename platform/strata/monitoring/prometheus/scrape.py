"""Scrape targets and the allowlists of series, used by the local configuration and by the cluster's monitor objects.

Ray alone can produce hundreds of thousands of series (a histogram for each method of each process). Dashboards and alerts read
a few dozen names, and the scrape drops most others. A name that a dashboard or alert starts to read must be added to a list here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from strata.monitoring.gpu.exporter import node_name
from strata.platform.errors import UserError

# Regular expressions, each anchored to the whole name.
RAY_SERIES = (
    "ray_strata_train_.*",
    "ray_node_cpu_(count|utilization)",
    "ray_node_mem_(total|used)",
    "ray_node_disk_utilization_percentage",
    "ray_node_network_(receive|send)_speed",
    "ray_node_gpus_utilization",
    "ray_node_gram_(available|used)",
    "ray_node_gpu_(power_milliwatts|temperature_celsius)",
    "ray_object_store_(available|used)_memory",
    "ray_memory_manager_worker_eviction_total",
    "ray_cluster_(active|failed|pending)_nodes",
    "ray_gcs_placement_group_count",
    "ray_internal_num_infeasible_scheduling_classes",
)
ENDPOINT_SERIES = ("strata_serve_.*",)  # the endpoint also exports vLLM's series, about a thousand lines per replica
GPU_SERIES = ("strata_gpu_.*",)
DCGM_SERIES = (
    "DCGM_FI_DEV_(GPU_UTIL|FB_USED|FB_FREE|POWER_USAGE|GPU_TEMP|SM_CLOCK|CLOCK_THROTTLE_REASONS|CLOCKS_EVENT_REASONS)",
    "DCGM_FI_DEV_(XID_ERRORS|ECC_DBE_VOL_TOTAL|(UN)?CORRECTABLE_REMAPPED_ROWS|ROW_REMAP_(FAILURE|PENDING))",
    "DCGM_FI_DEV_NVLINK_(CRC_FLIT|CRC_DATA|REPLAY|RECOVERY)_ERROR_COUNT_TOTAL",
)
KUBERAY_SERIES = ("kuberay_(cluster|job|service)_.*",)
# kube-state-metrics, for restarts and OOM kills of containers. kube-prometheus-stack and ARMS scrape it themselves.
KUBE_STATE_SERIES = ("kube_pod_container_status_(restarts_total|terminated_reason|last_terminated_reason)",)
PROMETHEUS_SERIES = ("prometheus_tsdb_head_series", "prometheus_rule_evaluation_failures_total", "process_resident_memory_bytes")

# Labels with the same value on every series of a process. WorkerId stays: without it, series of two workers would collide.
RAY_DROPPED_LABELS = "otel_scope_.*|Version"

LOCAL_CLUSTER = "local"  # the labels `cluster` and `ray_io_cluster` of every target on this machine
GPU_EXPORTER_PORT = 9835


def whole(names: Sequence[str]) -> str:
    return "|".join(names)


@dataclass(frozen=True)
class Endpoint:
    """An endpoint URL such as http://127.0.0.1:8000, split into scheme and address for Prometheus."""

    scheme: str
    address: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        scheme, separator, rest = url.partition("://")
        address = rest.rstrip("/")
        if not separator or scheme not in ("http", "https") or not address or "/" in address:
            raise UserError(f"--url '{url}' is not the address of an endpoint.", "Write it as http://HOST:PORT, without a path.")
        return cls(scheme, address if ":" in address else f"{address}:{443 if scheme == 'https' else 80}")


def laptop(folder: Path, port: int, endpoints: Sequence[str], gpu_port: int) -> dict[str, Any]:
    """Prometheus configuration for one machine. `folder` holds the rules and the target file of Ray clusters, which Prometheus
    watches because clusters start and stop while it runs."""
    parsed = [Endpoint.parse(url) for url in endpoints]
    return {
        # A run on a laptop may last a minute and should have more than three points.
        "global": {"scrape_interval": "5s", "scrape_timeout": "4s", "evaluation_interval": "15s"},
        "rule_files": [str(folder / "rules" / "*.yaml")],
        "scrape_configs": [
            {
                "job_name": "strata-ray",
                "file_sd_configs": [{"files": [str(folder / "targets" / "ray.json")], "refresh_interval": "5s"}],
                "metric_relabel_configs": [_keep(RAY_SERIES), {"regex": RAY_DROPPED_LABELS, "action": "labeldrop"}],
            },
            *(
                {
                    "job_name": f"strata-endpoint-{scheme}",
                    "scheme": scheme,
                    "static_configs": [_target(addresses)],
                    "metric_relabel_configs": [_keep(ENDPOINT_SERIES)],
                }
                for scheme in ("http", "https")
                if (addresses := [endpoint.address for endpoint in parsed if endpoint.scheme == scheme])
            ),
            {
                "job_name": "strata-gpu",
                "static_configs": [_target([f"127.0.0.1:{gpu_port}"])],
                "metric_relabel_configs": [_keep(GPU_SERIES)],
            },
            {
                "job_name": "prometheus",
                "static_configs": [_target([f"127.0.0.1:{port}"])],
                "metric_relabel_configs": [_keep(PROMETHEUS_SERIES)],
            },
        ],
    }


def _keep(names: Sequence[str]) -> dict[str, Any]:
    return {"source_labels": ["__name__"], "regex": whole(names), "action": "keep"}


def _target(addresses: Sequence[str], **labels: str) -> dict[str, Any]:
    return {"targets": list(addresses), "labels": {"cluster": LOCAL_CLUSTER, "ray_io_cluster": LOCAL_CLUSTER, **labels}}


def ray_targets(temp_dir: Path) -> str:
    """Metrics agents of Strata's running Ray clusters, in the format of Prometheus file discovery.

    Ray writes a similar file itself, but only with its dashboard, which local clusters do not start, and the file remains after
    the cluster has stopped. Every session has a file with its agent's port. `node` is the label that the GPU exporter uses for
    this machine; rules join the two on it."""
    addresses = sorted(f"127.0.0.1:{port}" for session in temp_dir.glob("session_2*") for port in _agent_ports(session))
    return json.dumps([_target(addresses, node=node_name())] if addresses else [])


def _agent_ports(session: Path) -> list[int]:
    """Agent ports of a session, if it is alive. The folder name ends with the PID of the process that called `ray.init`, and
    Ray's processes exit with it. A later process that reuses the PID started after the folder was created."""
    try:
        starter = psutil.Process(int(session.name.rpartition("_")[2]))
        if starter.create_time() > session.stat().st_mtime:
            return []
        return [int(file.read_text()) for file in session.glob("metrics_export_port_*")]
    except (psutil.NoSuchProcess, FileNotFoundError, ValueError):  # stopped, stopping, or still being written
        return []
