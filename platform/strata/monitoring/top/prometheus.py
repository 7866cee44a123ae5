"""Queries to a Prometheus server, limited to a Ray cluster and a namespace, with errors that say what to change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from strata.platform.errors import UserError

TIMEOUT_S = 20.0
RAY_CLUSTER, TEAM = "ray_io_cluster", "namespace"
# One of these exists wherever Strata is scraped: nodes, endpoints, runs, GPUs.
SIGNS = "ray_node_cpu_count|strata_serve_replicas|ray_strata_train_step|strata:node_gpus:count"

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    labels: Labels
    value: float


class Prometheus:
    """Client of one server. `limits` are the matchers of the chosen cluster and namespace."""

    def __init__(self, url: str, cluster: str | None, namespace: str | None) -> None:
        self.url = checked(url)
        self.limits = {label: value for label, value in ((RAY_CLUSTER, cluster), (TEAM, namespace)) if value is not None}
        self._client = httpx.Client(timeout=TIMEOUT_S, follow_redirects=True)

    def close(self) -> None:
        self._client.close()

    def require_series(self) -> None:
        """Raises an error if nothing matches, with the clusters or namespaces that exist."""
        if self.query(f"count({select(f'{{__name__=~{quoted(SIGNS)}}}', self.limits)})"):
            return
        if not self.query(f"count({{__name__=~{quoted(SIGNS)}}})"):
            raise UserError(
                f"Prometheus at {self.url} has no series of Strata.",
                "Deploy with a monitoring component (docs/monitoring.md), or set --prometheus to the server that scrapes it.",
            )
        chosen = " and ".join(f"{label}={quoted(value)}" for label, value in self.limits.items())
        known = self.query(f"group by ({RAY_CLUSTER}, {TEAM}) ({{__name__=~{quoted(SIGNS)}}})")
        clusters, teams = (
            sorted({sample.labels[label] for sample in known if sample.labels.get(label)}) for label in (RAY_CLUSTER, TEAM)
        )
        raise UserError(
            f"Prometheus at {self.url} has no series with {chosen}.",
            f"Ray clusters: {', '.join(clusters) or 'none'}. Namespaces: {', '.join(teams) or 'none'}.",
        )

    def query(self, expr: str) -> list[Sample]:
        """Values now. NaN, such as a quantile of nothing, is left out."""
        found = self._get("query", query=expr)["result"]
        samples = (Sample(one["metric"], float(one["value"][1])) for one in found)
        return [sample for sample in samples if not math.isnan(sample.value)]

    def number(self, expr: str) -> float | None:
        """The value of an expression with one series; None without one."""
        found = self.query(expr)
        return found[0].value if found else None

    def by(self, label: str, expr: str) -> dict[str, float]:
        return {sample.labels.get(label, ""): sample.value for sample in self.query(expr)}

    def history(self, label: str, expr: str, end: float, seconds: float, step: float) -> dict[str, tuple[float, ...]]:
        """Courses of values by a label."""
        found = self._get("query_range", query=expr, start=end - seconds, end=end, step=step)["result"]
        return {one["metric"].get(label, ""): tuple(float(value) for _, value in one["values"]) for one in found}

    def _get(self, what: str, **parameters: Any) -> dict[str, Any]:
        try:
            answer = self._client.post(f"{self.url}/api/v1/{what}", data=parameters)
        except httpx.HTTPError as error:
            raise UserError(
                f"Prometheus at {self.url} does not answer: {str(error) or type(error).__name__}.",
                "Check --prometheus. For a server inside Kubernetes: kubectl port-forward -n NAMESPACE service/NAME 9090.",
            ) from None
        if answer.status_code in (401, 403):
            raise UserError(
                f"Prometheus at {self.url} refuses the query with status {answer.status_code}.",
                "Set --prometheus to a server without login, such as a port-forward or Google's query frontend.",
            )
        try:
            body = answer.json()
            status = body["status"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.url} is not a Prometheus: /api/v1/{what} returned status {answer.status_code}.",
                "Set --prometheus to its address, with the path prefix if it has one, such as http://127.0.0.1:9090.",
            ) from None
        if status != "success":
            raise UserError(f"Prometheus at {self.url} failed: {body.get('error', 'no reason')}.", "Read the log of the server.")
        data: dict[str, Any] = body["data"]
        return data


def checked(url: str) -> str:
    wrong = UserError(
        f"--prometheus '{url}' is not the address of a server.",
        "Write it as http://HOST:PORT, such as --prometheus http://127.0.0.1:9090.",
    )
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        raise wrong from None
    if address.scheme not in ("http", "https") or not address.host:
        raise wrong
    return url.rstrip("/")


def quoted(value: str) -> str:
    """A PromQL string."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def select(selector: str, limits: Mapping[str, str]) -> str:
    """A selector such as `up` or `up{job="a"}` with further matchers."""
    matchers = ", ".join(f"{label}={quoted(value)}" for label, value in limits.items())
    if not matchers:
        return selector
    if not selector.endswith("}"):
        return f"{selector}{{{matchers}}}"
    return f"{selector[:-1]}, {matchers}}}"
