"""Conversion of Strata's alert rules to Grafana."""

import re
from pathlib import Path

import pytest

from strata.dashboards import alert_rules
from strata.platform.errors import UserError

GRAFANAS_FUNCTIONS = {"humanize", "humanize1024", "humanizeDuration", "humanizePercentage", "humanizeTimestamp", "printf"}


@pytest.fixture(scope="module")
def groups(root: Path) -> list[alert_rules.Group]:
    return alert_rules.read(root / "infra" / "prometheus" / "rules")


def test_every_alert_is_converted_with_a_unique_name(groups: list[alert_rules.Group], root: Path) -> None:
    files = (root / "infra" / "prometheus" / "rules").glob("*.yaml")
    written = [name for file in files for name in re.findall(r"- alert: (\w+)", file.read_text())]
    rules = [rule for group in groups for rule in group.rules]
    assert len(written) == len(rules) > 15
    for key in ("uid", "title"):
        assert len({rule[key] for rule in rules}) == len(rules)
    assert all(re.fullmatch(r"strata-[a-z0-9-]{1,33}", rule["uid"]) for rule in rules)
    assert all(group.interval_s % 10 == 0 for group in groups)


def test_annotations_use_only_grafana_functions(groups: list[alert_rules.Group]) -> None:
    texts = [text for group in groups for rule in group.rules for text in rule["annotations"].values()]
    insides = [inside for text in texts for inside in re.findall(r"{{(.*?)}}", text)]
    assert insides
    for inside in insides:
        assert "$value " not in f"{inside} "
        words = set(re.findall(r"(?<![$.\w\"])[a-zA-Z]\w*", re.sub(r'"[^"]*"', "", inside)))
        assert words <= GRAFANAS_FUNCTIONS, inside


@pytest.mark.parametrize(
    ("prometheus", "grafana"),
    [("0s", "0s"), ("90s", "1m30s"), ("90m", "1h30m"), ("1h30m", "1h30m"), ("24h", "1d"), ("36h", "36h")],
)
def test_durations_match_grafanas_format(prometheus: str, grafana: str) -> None:
    assert alert_rules.written(alert_rules.seconds(prometheus)) == grafana


def test_alerts_with_the_same_name_are_numbered(tmp_path: Path) -> None:
    twice = "groups: [{name: g, rules: [{alert: Hot, expr: 'a > 1'}, {alert: Hot, expr: 'a > 2'}]}]"
    (tmp_path / "rules.yaml").write_text(twice)
    [group] = alert_rules.read(tmp_path)
    assert [rule["title"] for rule in group.rules] == ["Hot 1", "Hot 2"]
    assert [rule["uid"] for rule in group.rules] == ["strata-hot-1", "strata-hot-2"]
    assert group.interval_s == 60


def test_missing_rules_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--no-alerts"):
        alert_rules.read(tmp_path / "none")
