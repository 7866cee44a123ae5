"""Derives what other programs export from their sources, at the versions that Strata's manifests and guides pin.

`python tests/monitoring/expositions/derive.py FOLDER` reads clones in FOLDER (kuberay, dcgm-exporter, go-dcgm,
kube-state-metrics) and writes the files beside this script. Sample values are 1 and label values empty: tests read names, types
and labels.
"""

import html
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
KUBERAY, KUBE_STATE_METRICS, DCGM_EXPORTER = "v1.7.0", "v2.17.0", "4.2.3-4.1.3"
COUNTERS = HERE.parents[2] / "infra" / "components" / "dcgm-profiling" / "counters.csv"

Metric = tuple[str, str, tuple[str, ...]]  # name, type, labels


def source(clone: Path, revision: str, path: str) -> str:
    return subprocess.run(
        ["git", "-C", str(clone), "show", f"{revision}:{path}"], check=True, capture_output=True, text=True
    ).stdout


def kuberay(clone: Path) -> list[Metric]:
    """Metrics of the operator: descriptors of a collector, and gauge vectors."""
    found: list[Metric] = []
    for kind in ("cluster", "job", "service"):
        text = source(clone, KUBERAY, f"ray-operator/controllers/ray/metrics/ray_{kind}_metrics.go")
        for name, labels in re.findall(r'"(kuberay_\w+)",.*?\[\]string\{([^}]*)\}', text, re.DOTALL):
            found.append((name, "gauge", tuple(re.findall(r'"(\w+)"', labels))))
    return found


def kube_state_metrics(clone: Path) -> list[Metric]:
    """Container states of pods, from the documented table."""
    found: list[Metric] = []
    for line in source(clone, KUBE_STATE_METRICS, "docs/metrics/workload/pod-metrics.md").splitlines():
        cells = [html.unescape(cell).strip() for cell in line.split("|")]
        if len(cells) > 5 and cells[1].startswith("kube_pod_container_status_"):
            found.append((cells[1], cells[2].lower(), tuple(re.findall(r"`(\w+)`", cells[5]))))
    return found


def dcgm_labels(clone: Path) -> tuple[str, ...]:
    """Labels of a GPU's series: those of the template, and those of the pod that uses the GPU."""
    template = source(clone, DCGM_EXPORTER, "internal/pkg/rendermetrics/render_metrics.go")
    gpu = template.partition("gpuMetricsFormat = `")[2].partition("`")[0]
    attributes = source(clone, DCGM_EXPORTER, "internal/pkg/transformation/const.go")
    pod = re.findall(r'\t(?:pod|namespace|container)Attribute\s*= "(\w+)"', attributes)
    return (*re.findall(r'(\w+)="\{\{', gpu), "UUID", *pod)  # the template takes the name UUID from the metric


def dcgm_fields(exporter: Path, library: Path) -> list[str]:
    """Names that a counters file may have. The exporter ends at any other."""
    [commit] = re.findall(r"NVIDIA/go-dcgm v\S+-(\w+)", source(exporter, DCGM_EXPORTER, "go.mod"))
    return sorted(re.findall(r'^\t"(DCGM_FI_\w+)":', source(library, commit, "pkg/dcgm/const_fields.go"), re.MULTILINE))


def counters(file: Path) -> list[tuple[str, str]]:
    """Fields and Prometheus types of a counters file. A field of the type `label` becomes a label of every series."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    assert all(len(row) == 3 for row in rows), "the exporter refuses other lines"
    return [(name, kind) for name, kind, _ in rows]


def exposition(origin: str, metrics: Iterable[Metric]) -> str:
    lines = [f"# {origin}"]
    for name, kind, labels in metrics:
        pairs = ",".join(label + '=""' for label in labels)
        lines += [f"# TYPE {name} {kind}", f"{name}{{{pairs}}} 1"]
    return "\n".join(lines) + "\n"


def main(clones: Path) -> None:
    labels = dcgm_labels(clones / "dcgm-exporter")
    watched = counters(COUNTERS)
    labels += tuple(name for name, kind in watched if kind == "label")
    written = {
        "kuberay_operator.txt": exposition(f"KubeRay {KUBERAY}, from its source", kuberay(clones / "kuberay")),
        "kube_state_metrics.txt": exposition(
            f"kube-state-metrics {KUBE_STATE_METRICS}, from its documentation", kube_state_metrics(clones / "kube-state-metrics")
        ),
        "dcgm_exporter.txt": exposition(
            f"dcgm-exporter {DCGM_EXPORTER}, from its source and infra/components/dcgm-profiling/counters.csv",
            [(name, kind, labels) for name, kind in watched if kind != "label"],
        ),
        "dcgm_fields.txt": "\n".join(dcgm_fields(clones / "dcgm-exporter", clones / "go-dcgm")) + "\n",
    }
    for name, text in written.items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
