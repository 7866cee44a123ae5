"""Converts Prometheus alerts to Grafana alert rules, for a Prometheus that cannot load rule files.

A Prometheus alert fires for every series that its expression returns, whatever the value. A Grafana rule fires if a number is
above a threshold. The converted rule therefore has an intermediate expression that is 1 for every series, as in Grafana's own
import of Prometheus rules.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from strata.dashboards.board import DATA_SOURCE
from strata.monitoring.prometheus import runbooks
from strata.platform.errors import UserError

UID_LENGTH = 40  # Grafana's limit
LOOK_BACK_S = 600  # Grafana requires a range, though an instant query reads only its end
EXPRESSION = "__expr__"  # data source of expressions that Grafana computes
DEFAULT_INTERVAL = "1m"  # the default of Prometheus, for groups without an interval
BEAT_S = 10  # Grafana rejects intervals that are not a multiple of this
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class Group:
    name: str
    interval_s: int
    rules: tuple[dict[str, Any], ...]

    def json(self, folder_uid: str) -> dict[str, Any]:
        """The body of a rule group in Grafana's provisioning API."""
        rules = [{**rule, "folderUID": folder_uid, "ruleGroup": self.name} for rule in self.rules]
        return {"title": self.name, "folderUid": folder_uid, "interval": self.interval_s, "rules": rules}


def read(files: Path) -> list[Group]:
    """Reads the rule groups that have alerts. Recording rules are skipped: Prometheus evaluates them."""
    if not files.is_dir():
        raise UserError(
            f"The folder of alert rules {files} does not exist.",
            "Run it from a full checkout, or push without alerts: --no-alerts.",
        )
    groups = []
    for file in sorted(files.glob("*.yaml")):
        for group in yaml.safe_load(runbooks.with_base(file.read_text()))["groups"]:
            alerts = [rule for rule in group["rules"] if "alert" in rule]
            if alerts:
                rules = tuple(_rule(alert, _title(alert, alerts)) for alert in alerts)
                interval_s = seconds(group.get("interval", DEFAULT_INTERVAL))
                groups.append(Group(group["name"], math.ceil(interval_s / BEAT_S) * BEAT_S, rules))
    return groups


def seconds(duration: str) -> int:
    """Seconds of a Prometheus duration such as `1h30m`."""
    return sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([dhms])", str(duration)))


def written(duration_s: int) -> str:
    """Formats a duration as Grafana returns it, with days only for whole days."""
    if duration_s and duration_s % UNITS["d"] == 0:
        return f"{duration_s // UNITS['d']}d"
    parts = [(duration_s // 3600, "h"), (duration_s % 3600 // 60, "m"), (duration_s % 60, "s")]
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def _title(alert: dict[str, Any], group: list[dict[str, Any]]) -> str:
    """Title of a rule, numbered if alerts share a name: Grafana requires unique titles in a folder, Prometheus does not."""
    same = [other for other in group if other["alert"] == alert["alert"]]
    name: str = alert["alert"]
    return name if len(same) == 1 else f"{name} {same.index(alert) + 1}"


def _rule(alert: dict[str, Any], title: str) -> dict[str, Any]:
    rule = {
        "uid": uid(title),
        "title": title,
        "condition": "C",
        "data": [_query(alert["expr"].strip()), _exists("A"), _above_zero("B")],
        "noDataState": "OK",  # no series: the alert does not fire
        "execErrState": "Error",
        "for": written(seconds(alert.get("for", "0s"))),
        "labels": {key: str(value) for key, value in alert.get("labels", {}).items()},
        "annotations": {key: _template(str(value).strip()) for key, value in alert.get("annotations", {}).items()},
        "isPaused": False,
    }
    if "keep_firing_for" in alert:
        rule["keep_firing_for"] = written(seconds(alert["keep_firing_for"]))
    return rule


def uid(title: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "-", title).strip("-").lower()
    return f"strata-{words.removeprefix('strata-')}"[:UID_LENGTH]


def _template(text: str) -> str:
    """Replaces `$value`, which in Grafana is a text about all queries, by the number of query A."""
    return re.sub(r"\$value\b", "$values.A.Value", text)


def _query(expr: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": DATA_SOURCE}
    return _node("A", DATA_SOURCE, {"datasource": source, "expr": expr, "instant": True, "range": False}, LOOK_BACK_S)


def _exists(of: str) -> dict[str, Any]:
    return _computed("B", {"type": "math", "expression": f"is_number(${of}) || is_nan(${of}) || is_inf(${of})"})


def _above_zero(of: str) -> dict[str, Any]:
    return _computed("C", {"type": "threshold", "expression": of, "conditions": [{"evaluator": {"type": "gt", "params": [0]}}]})


def _computed(ref: str, model: dict[str, Any]) -> dict[str, Any]:
    return _node(ref, EXPRESSION, {"datasource": {"type": EXPRESSION, "uid": EXPRESSION}, **model}, 0)


def _node(ref: str, source: str, model: dict[str, Any], from_s: int) -> dict[str, Any]:
    # Grafana adds these defaults itself. Sending them makes a rule that is read back equal to the rule that was sent.
    filled_in = {"refId": ref, "intervalMs": 1000, "maxDataPoints": 43200}
    return {
        "refId": ref,
        "datasourceUid": source,
        "relativeTimeRange": {"from": from_s, "to": 0},
        "model": {**model, **filled_in},
    }
