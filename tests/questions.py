"""PromQL expressions of all dashboards, recording rules and alerts."""

import yaml
from dashboards.promql import parsed
from support import ROOT

from strata.dashboards import queries
from strata.platform.metrics import Metric

PANELS = queries.every()
RULES = [
    rule
    for file in sorted((ROOT / "infra" / "prometheus" / "rules").glob("*.yaml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
RECORDS = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}
EXPRESSIONS = [*(panel.resolved() for panel in PANELS), *(rule["expr"] for rule in RULES)]  # rules may share a record's name
NAMES = {name for expr in EXPRESSIONS for name in parsed(expr).names}


def series_of(metric: Metric) -> set[str]:
    """Series names of a metric. A histogram has three."""
    return {metric.exported + part for part in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))}
