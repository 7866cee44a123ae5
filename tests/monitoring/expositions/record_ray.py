"""Records the series of a real Ray node: those of its C++ processes, which no Python source defines.

`python tests/monitoring/expositions/record_ray.py` starts a cluster with a placement group and an object, and writes ray.txt.
Label values are left empty, so that a new recording differs only where Ray does.
"""

import time
import urllib.request
from pathlib import Path

import ray
from derive import exposition
from prometheus_client.parser import text_string_to_metric_families
from ray.util.placement_group import placement_group

HERE = Path(__file__).parent
WAIT_S = 40  # Ray exports every ten seconds
CPP = ("ray_object_store_", "ray_gcs_", "ray_internal_")  # of the raylet and the GCS server


def scraped() -> str:
    [node] = ray.nodes()
    with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    group = placement_group([{"CPU": 2}])  # stays pending
    held = ray.put(bytes(1_000_000))
    time.sleep(WAIT_S)
    families = list(text_string_to_metric_families(scraped()))
    del group, held
    ray.shutdown()
    metrics = {
        sample.name: (sample.name, "counter" if sample.name.endswith("_total") else "gauge", tuple(sorted(sample.labels)))
        for family in families
        if family.type in ("gauge", "counter")
        for sample in family.samples
        if sample.name.startswith(CPP)
    }
    (HERE / "ray.txt").write_text(exposition(f"Ray {ray.__version__}, recorded", [metrics[name] for name in sorted(metrics)]))


if __name__ == "__main__":
    main()
