"""Example routes of Alertmanager and Grafana: valid, equal, and with a receiver for every alert of every team."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from questions import RULES
from support import ROOT

EXAMPLES = ROOT / "infra" / "prometheus" / "examples"
ALERTMANAGER = yaml.safe_load((EXAMPLES / "alertmanager.yaml").read_text())
GRAFANA = yaml.safe_load((EXAMPLES / "grafana-contact-points.yaml").read_text())
NAMES = {rule["alert"] for rule in RULES if "alert" in rule}

# Keys of Alertmanager's and Grafana's formats that the examples may use. Both programs refuse unknown ones.
ROUTE = {"receiver", "group_by", "group_wait", "group_interval", "repeat_interval", "matchers", "routes", "continue"}
POLICY = ROUTE - {"matchers"} | {"orgId", "object_matchers", "mute_time_intervals"}
COMPARE: dict[str, Callable[[str, str], bool]] = {
    "=": lambda value, wanted: value == wanted,
    "!=": lambda value, wanted: value != wanted,
    "=~": lambda value, wanted: bool(re.fullmatch(wanted, value)),
    "!~": lambda value, wanted: not re.fullmatch(wanted, value),
}

Route = dict[str, Any]
Matcher = tuple[str, str, str]


def matcher(text: str) -> Matcher:
    found = re.fullmatch(r'(\w+) (=~|!~|!=|=) "([^"]*)"', text)
    assert found, text
    return found[1], found[2], found[3]


def matchers(route: Route) -> list[Matcher]:
    return [*(matcher(text) for text in route.get("matchers", ())), *(tuple(each) for each in route.get("object_matchers", ()))]


def routes(route: Route) -> Iterator[Route]:
    yield route
    for inner in route.get("routes", ()):
        yield from routes(inner)


def chosen(route: Route, labels: dict[str, str]) -> Route:
    """The route of an alert: depth first, the first one that matches."""
    for inner in route.get("routes", ()):
        if all(COMPARE[op](labels.get(name, ""), value) for name, op, value in matchers(inner)):
            return chosen(inner, labels)
    return route


def alertmanager(labels: dict[str, str]) -> str:
    receiver: str = chosen(ALERTMANAGER["route"], labels)["receiver"]
    return receiver


def grafana(labels: dict[str, str]) -> str:
    route = chosen(GRAFANA["policies"][0], labels)
    return "nobody" if route.get("mute_time_intervals") else str(route["receiver"])


@pytest.mark.parametrize("sender", [alertmanager, grafana])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"severity": "critical", "namespace": "team-a"}, "team-a-pager"),
        ({"severity": "warning", "namespace": "team-a"}, "team-a"),
        ({"severity": "critical", "namespace": "team-b"}, "team-b-pager"),
        ({"severity": "warning", "namespace": "team-b"}, "team-b"),
        ({"severity": "info", "namespace": "team-a"}, "nobody"),
        ({"severity": "critical"}, "platform-pager"),
        ({"severity": "warning", "namespace": "team-ab"}, "platform"),
    ],
)
def test_alerts_reach_their_team(sender: Callable[[dict[str, str]], str], labels: dict[str, str], expected: str) -> None:
    assert sender(labels) == expected


def test_routes_have_known_keys_and_receivers() -> None:
    assert ALERTMANAGER.keys() == {"global", "route", "inhibit_rules", "receivers"}
    receivers = [receiver["name"] for receiver in ALERTMANAGER["receivers"]]
    assert len(set(receivers)) == len(receivers)
    used = list(routes(ALERTMANAGER["route"]))
    assert {route["receiver"] for route in used} == set(receivers), "no receiver is undefined or unused"
    assert all(route.keys() <= ROUTE for route in used)
    assert "matchers" not in used[0], "the first route takes everything"
    for receiver in ALERTMANAGER["receivers"]:
        assert receiver.keys() <= {"name", "slack_configs", "pagerduty_configs"}
        assert all(slack["channel"].startswith("#") for slack in receiver.get("slack_configs", ()))
        assert all(pager.keys() == {"routing_key"} for pager in receiver.get("pagerduty_configs", ()))


def test_policies_have_known_keys_and_contact_points() -> None:
    assert GRAFANA.keys() == {"apiVersion", "contactPoints", "policies", "muteTimes"} and GRAFANA["apiVersion"] == 1
    points = [point["name"] for point in GRAFANA["contactPoints"]]
    assert len(set(points)) == len(points)
    [root] = GRAFANA["policies"]
    used = list(routes(root))
    assert {route["receiver"] for route in used} == set(points)
    assert all(route.keys() <= POLICY for route in used)
    needed = {"slack": {"recipient", "url"}, "pagerduty": {"integrationKey"}}
    uids = [receiver["uid"] for point in GRAFANA["contactPoints"] for receiver in point["receivers"]]
    assert len(set(uids)) == len(uids) and max(map(len, uids)) <= 40, "Grafana's limit"
    for point in GRAFANA["contactPoints"]:
        assert all(receiver["settings"].keys() == needed[receiver["type"]] for receiver in point["receivers"])
    muted = {name for route in used for name in route.get("mute_time_intervals", ())}
    assert muted == {interval["name"] for interval in GRAFANA["muteTimes"]}


def test_muted_alerts_exist_and_are_about_the_same_thing() -> None:
    labels = {rule["alert"]: rule["expr"] + str(rule["annotations"]) for rule in RULES if "alert" in rule}
    for rule in ALERTMANAGER["inhibit_rules"]:
        assert rule.keys() == {"source_matchers", "target_matchers", "equal"}
        [source], [target] = ([matcher(text) for text in rule[f"{side}_matchers"]] for side in ("source", "target"))
        muted = {name for name in NAMES if COMPARE[target[1]](name, target[2])}
        assert source[2] in NAMES and muted and source[2] not in muted
        for label in rule["equal"]:
            missing = [name for name in (source[2], *muted) if not re.search(rf"\b{label}\b|strata:", labels[name])]
            assert not missing, f"{missing} have no label {label}"
