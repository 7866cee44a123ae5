"""Prometheus rules in PrometheusRule, Rules, ClusterRules and ConfigMaps: queries, durations, names and templates.

Intervals and patterns of monitors too: Prometheus rejects its whole configuration for one that is broken.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from strata.deploy.checks import patterns
from strata.deploy.documents import Document
from strata.deploy.problem import Finding

KINDS = ("PrometheusRule", "Rules", "ClusterRules", "GlobalRules")
DURATION = re.compile(r"0|(?=.)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
MONITORS = ("PodMonitor", "ServiceMonitor", "PodMonitoring", "ClusterPodMonitoring")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def findings(document: Document) -> Iterator[Finding]:
    if document["kind"] in KINDS:
        yield from _groups((document.get("spec") or {}).get("groups") or [], "spec.groups")
    elif document["kind"] in MONITORS:
        yield from _patterns(document.get("spec"), "spec")
        for key in ("podMetricsEndpoints", "endpoints"):
            for i, endpoint in enumerate((document.get("spec") or {}).get(key) or []):
                found = _durations(endpoint, ("interval", "timeout", "scrapeTimeout"))
                yield from (finding.below(f"spec.{key}[{i}]") for finding in found)
    elif document["kind"] == "ConfigMap":
        for key, text in (document.get("data") or {}).items():
            yield from _groups(_file_groups(key, text), f"data.{key}.groups")


def _file_groups(key: str, text: str) -> list[Any]:
    """Groups of a rule file; empty for other files. Broken YAML is reported by the check of texts."""
    if not key.endswith((".yaml", ".yml")) or "groups" not in text:
        return []
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return []
    groups = content.get("groups") if isinstance(content, dict) else None
    if not isinstance(groups, list):
        return []
    return [group for group in groups if isinstance(group, dict) and isinstance(group.get("rules"), list)]


def _groups(groups: list[Document], path: str) -> Iterator[Finding]:
    for name, count in Counter(str(group.get("name")) for group in groups).items():
        if count > 1:
            yield Finding(path, f"the group {name} occurs twice")
    for i, group in enumerate(groups):
        yield from (finding.below(f"{path}[{i}]") for finding in _durations(group, ("interval", "query_offset")))
        for j, rule in enumerate(group.get("rules") or []):
            yield from (finding.below(f"{path}[{i}].rules[{j}]") for finding in _rule(rule))


def _rule(rule: Document) -> Iterator[Finding]:
    import promql_parser

    alert, record = rule.get("alert"), rule.get("record")
    if bool(alert) == bool(record):
        yield Finding("", "needs either alert or record")
    if record and not METRIC.fullmatch(str(record)):
        yield Finding("record", f"'{record}' is not a metric's name")
    try:
        promql_parser.parse(str(rule.get("expr", "")))
    except ValueError as error:
        yield Finding("expr", f"is not valid PromQL: {' '.join(str(error).split())}")
    yield from _durations(rule, ("for", "keep_firing_for"))
    for field in ("labels", "annotations"):
        for key, value in (rule.get(field) or {}).items():
            if not LABEL.fullmatch(key):
                yield Finding(f"{field}.{key}", "is not a label's name: letters, digits and '_'")
            if str(value).count("{{") != str(value).count("}}"):
                yield Finding(f"{field}.{key}", "has a template without an end: '{{' and '}}' differ in number")


def _patterns(node: Any, path: str) -> Iterator[Finding]:
    """Patterns of relabelings, anywhere in a monitor."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _patterns(item, f"{path}[{i}]")
    for field, value in node.items() if isinstance(node, dict) else ():
        if field == "regex" and isinstance(value, str):
            try:
                patterns.compiled(value)
            except re.error as error:
                yield Finding(f"{path}.regex", f"is not a pattern: {error}")
        else:
            yield from _patterns(value, f"{path}.{field}")


def _durations(value: Document, fields: tuple[str, ...]) -> Iterator[Finding]:
    for field in fields:
        if value.get(field) is not None and not DURATION.fullmatch(str(value[field])):
            yield Finding(field, f"'{value[field]}' is not a duration, such as 5m")
