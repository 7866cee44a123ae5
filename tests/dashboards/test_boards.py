"""Dashboards as JSON for Grafana."""

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import KUBECTL

from strata.dashboards import alert_links, alert_panels, boards, generate, queries, series, style
from strata.dashboards.board import VARIABLES
from strata.dashboards.promql import FILTERS, labels
from strata.monitoring.prometheus import runbooks
from strata.platform import metrics

from .promql import drawn_labels, parsed

BOARDS = {board.uid: board.json() for board in boards.every()}
QUERIES = queries.every()


def parts(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows and panels, also those inside collapsed rows."""
    return [part for top in board["panels"] for part in (top, *top.get("panels", []))]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in parts(board) if part["type"] != "row"]


@pytest.fixture(scope="module")
def rules(root: Path) -> dict[str, list[str]]:
    """Expressions of recording rules by name. Rules of one name have different labels."""
    files = (root / "infra" / "prometheus" / "rules").glob("*.yaml")
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    found: dict[str, list[str]] = {}
    for rule in (rule for group in groups for rule in group["rules"] if "record" in rule):
        found.setdefault(rule["record"], []).append(rule["expr"])
    return found


def test_generated_files_are_up_to_date(root: Path) -> None:
    stale = [
        str(path) for path, text in generate.files().items() if not (root / path).is_file() or (root / path).read_text() != text
    ]
    assert not stale, "run 'strata dashboards build'"
    assert not generate.left_over(root)


def test_write_updates_changed_and_removes_obsolete_files(tmp_path: Path) -> None:
    assert len(generate.write(tmp_path)) == len(generate.files()) + 1, "and the rules of prices"
    assert generate.write(tmp_path) == []
    (tmp_path / generate.JSON / "training.json").write_text("{}")
    (tmp_path / generate.JSON / "gone.json").write_text("{}")
    assert generate.left_over(tmp_path) == [generate.JSON / "gone.json"]
    assert generate.write(tmp_path) == [generate.JSON / "training.json", generate.JSON / "gone.json"]
    assert generate.write(tmp_path) == []


def test_board_uids_and_titles_are_unique() -> None:
    assert set(BOARDS) == {"strata-oncall", "strata-cluster", "strata-training", "strata-serving", "strata-teams"}
    assert len({board["title"] for board in BOARDS.values()}) == len(BOARDS)
    assert all(board["uid"] == uid and board["schemaVersion"] == 39 for uid, board in BOARDS.items())


@pytest.mark.parametrize("uid", BOARDS)
def test_every_panel_has_title_description_and_unit(uid: str) -> None:
    kinds = {"timeseries", "stat", "bargauge", "heatmap", "table", "alertlist"}
    ids = [part["id"] for part in parts(BOARDS[uid])]
    assert ids == list(range(1, len(ids) + 1))
    for panel in panels(BOARDS[uid]):
        assert panel["type"] in kinds
        assert panel["title"]
        assert panel["description"].endswith(".") and "\n" not in panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in set(style.Unit), panel["title"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
        assert panel["datasource"]["uid"] == "${datasource}"
        targets = panel.get("targets", [])
        assert all(target["datasource"]["uid"] == "${datasource}" for target in targets)
        assert len({target["refId"] for target in targets}) == len(targets)
        assert bool(targets) == (panel["type"] != "alertlist")


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_do_not_overlap(uid: str) -> None:
    for group in (BOARDS[uid]["panels"], *(row.get("panels", []) for row in BOARDS[uid]["panels"])):
        assert_apart([part["gridPos"] for part in group])


def assert_apart(spaces: list[dict[str, int]]) -> None:
    assert all(space["x"] >= 0 and space["x"] + space["w"] <= 24 for space in spaces)
    for one, other in combinations(spaces, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)


def test_queries_match_the_json() -> None:
    sent = {
        (uid, panel["title"], target["expr"])
        for uid in BOARDS
        for panel in panels(BOARDS[uid])
        for target in panel.get("targets", [])
    }
    sent |= {(uid, f"annotation {mark['name']}", mark["expr"]) for uid in BOARDS for mark in BOARDS[uid]["annotations"]["list"]}
    assert sent == {(query.board, query.panel, query.expr) for query in QUERIES}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.board}: {query.panel}")
def test_query_reads_known_series_and_labels(query: queries.Query) -> None:
    found = parsed(query.resolved(cluster="local", ray_cluster="c", team="t", node="n", run="a|b", model="m", replica="r"))
    assert found.names <= set(queries.KNOWN)
    reads = {queries.KNOWN[name] for name in found.names}
    assert reads == set(query.reads())
    for name, label in found.matched:
        assert label in labels(queries.KNOWN[name]), f"{name} has no label {label}"
    assert found.grouped <= {"le", *(label for read in reads for label in labels(read))}
    rated = [queries.KNOWN[name] for name in found.rated]
    kinds = {metric.kind for metric in rated if isinstance(metric, metrics.Metric)}
    assert kinds <= {"counter", "histogram"}, "a rate of a gauge means nothing"


@pytest.mark.parametrize("uid", BOARDS)
def test_variables_are_defined_where_they_are_used(uid: str) -> None:
    defined = [variable["name"] for variable in BOARDS[uid]["templating"]["list"]]
    used = {word for query in QUERIES if query.board == uid for word in re.findall(r"\$(\w+)", query.expr)}
    assert used - {"__rate_interval", "__range"} == set(defined) - {"datasource"}
    for variable in BOARDS[uid]["templating"]["list"][1:]:
        assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".*"
        earlier = set(defined[: defined.index(variable["name"])])
        assert set(re.findall(r"\$(\w+)", variable["definition"])) <= earlier, "a variable may only refer to earlier variables"


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_list_existing_labels(name: str) -> None:
    selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", VARIABLES[name]).groups()  # type: ignore[union-attr]
    assert label == FILTERS.get(name, name)
    names = re.findall(r"__name__=~\"([^\"]*)\"", selector)
    found = parsed(re.sub(r"\$\w+", ".*", selector))
    matched = {matcher for _, matcher in found.matched} - {"__name__"}
    for known in names[0].split("|") if names else found.names:
        assert {*matched, label} <= set(labels(queries.KNOWN[known])), known


def test_every_metric_is_read_by_a_panel_directly_or_through_rules(rules: dict[str, list[str]]) -> None:
    read = {name for query in QUERIES for name in parsed(query.resolved()).names}
    while more := {name for rule in read & set(rules) for expr in rules[rule] for name in parsed(expr).names} - read:
        read |= more
    unread = [metric.name for metric in metrics.EVERY if not {metric.exported, f"{metric.exported}_bucket"} & read]
    assert not unread


def test_every_listed_series_is_read_and_recorded_series_have_rules(rules: dict[str, list[str]]) -> None:
    read = {foreign for query in QUERIES for foreign in query.reads() if isinstance(foreign, series.Series)}
    assert read == set(series.EVERY)
    recorded = {foreign.exported for foreign in series.EVERY if foreign.source.endswith(" rules")}
    assert recorded <= set(rules)


def test_objective_limits_are_bucket_bounds() -> None:
    assert style.FIRST_TOKEN.bad in metrics.SERVE_FIRST_TOKEN.buckets
    assert style.INTER_TOKEN.bad in metrics.SERVE_INTER_TOKEN.buckets


def test_falling_limits_are_red_below() -> None:
    assert [step.color for step in style.BUSY.steps()] == [style.BAD, style.WATCH, style.GOOD]
    assert [step.value for step in style.BUSY.steps()] == [None, 0.1, 0.5]


@pytest.mark.slow
def test_cluster_config_maps_have_the_same_boards(root: Path, tmp_path: Path) -> None:
    component = shutil.copytree(root / generate.COMPONENT, tmp_path / "component")
    (tmp_path / "kustomization.yaml").write_text(f"components: [{component.name}]\n")
    built = subprocess.run([KUBECTL, "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    maps = list(yaml.safe_load_all(built.stdout))
    boards_there = {name: text for found in maps for name, text in found["data"].items()}
    assert boards_there == {f"{board.uid}.json": generate.board_text(board) for board in boards.every()}
    for found in maps:
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(yaml.safe_dump(found)) < 262144, "kubectl apply keeps the whole object in an annotation of that size"


# Size: a board of 16,384 GPUs is as readable as one of eight.

MANY = {"node", "gpu", "ip", "rank", "replica", "pid", "pod"}  # labels with as many values as there are machines


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.board}: {query.panel}")
def test_no_panel_draws_a_line_per_machine(query: queries.Query) -> None:
    expr = query.resolved()
    if re.match(r"(topk|bottomk)\(10, ", expr) and query.instant:
        return
    if query.reads() != (series.ALERTS,):
        assert not drawn_labels(expr) & {*MANY, "*"}


def test_ranges_of_time_read_no_series_per_gpu() -> None:
    for query in QUERIES:
        if not query.instant:
            assert not [read.exported for read in query.reads() if {"gpu", "rank"} & set(labels(read))], query


def test_alert_tables_link_to_runbook_and_boards() -> None:
    [table] = [panel for panel in panels(BOARDS["strata-oncall"]) if panel["type"] == "table"]
    [override] = table["fieldConfig"]["overrides"]
    assert override["matcher"] == {"id": "byName", "options": "alertname"}
    links = {link["title"]: link["url"] for link in override["properties"][0]["value"]}
    assert links["Runbooks"] == f"{runbooks.BASE}#alerts"
    boards_linked = {re.search(r"/d/([\w-]+)\?", url)[1] for url in links.values() if url.startswith("/d/")}  # type: ignore[index]
    assert boards_linked <= set(BOARDS) and len(boards_linked) == 3
    for url in links.values():
        for variable in re.findall(r"var-(\w+)=", url):
            assert variable in VARIABLES


def test_panels_link_to_the_runbooks_of_their_alerts(root: Path) -> None:
    files = (root / "infra" / "prometheus" / "rules").glob("*.yaml")
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    named = {alert for board in boards.every() for panel in board.panels() for alert in panel.alerts}
    assert named <= alerts
    for alert, (uid, number) in alert_panels.panels().items():
        [panel] = [part for part in parts(BOARDS[uid]) if part["id"] == number]
        assert {"title": f"Runbook: {alert}", "url": alert_links.runbook(alert)}.items() <= {
            key: value for link in panel["links"] if alert in link["title"] for key, value in link.items()
        }.items()


def test_alerts_in_grafana_name_their_panel() -> None:
    rules = [{"title": "StrataGpuThrottled", "annotations": {"summary": "s"}}, {"title": "Other", "annotations": {}}]
    throttled, other = alert_panels.with_panels({"title": "g", "rules": rules})["rules"]
    uid, number = throttled["annotations"]["__dashboardUid__"], throttled["annotations"]["__panelId__"]
    [panel] = [part for part in parts(BOARDS[uid]) if str(part["id"]) == number]
    assert (uid, panel["title"]) == ("strata-cluster", "Throttled GPUs")
    assert throttled["annotations"]["summary"] == "s" and other == rules[1]


def test_boards_mark_deployments_and_restarts() -> None:
    marks = {uid: [mark["name"] for mark in board["annotations"]["list"]] for uid, board in BOARDS.items()}
    assert all("Deployments" in names for names in marks.values())
    assert {uid for uid, names in marks.items() if "Restarts" in names} == {"strata-oncall", "strata-training"}


def test_collapsed_rows_hold_their_panels() -> None:
    for board in boards.every():
        rows = {part["title"]: part for part in BOARDS[board.uid]["panels"] if part["type"] == "row"}
        assert not board.rows[0].collapsed, "the summary is always open"
        for row in board.rows:
            inside = [panel["title"] for panel in rows[row.title].get("panels", [])]
            assert rows[row.title].get("collapsed", False) == row.collapsed
            assert inside == ([panel.title for panel in row.panels] if row.collapsed else [])
