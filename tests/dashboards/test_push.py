"""`strata dashboards push` against a fake Grafana with tokens, versions and conflicts."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from strata.dashboards import boards, commands
from strata.dashboards.grafana import Grafana
from strata.dashboards.push import MESSAGE
from strata.platform.errors import UserError

from .grafana_stand_in import ADMIN, VIEWER, StandIn, Store

PROMETHEUS = "http://prometheus:9090"
RULES = """
groups:
  - name: strata training
    interval: 15s
    rules:
      - record: strata:step:max
        expr: max by (run) (step)
      - alert: StrataTrainingStalled
        expr: "changes(step[15m]) == 0\\n"
        for: 90m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.run }} stands still"
          description: "{{ $value | humanize }} steps left"
"""

Push = Callable[..., Result]


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    with StandIn().running() as running:
        yield running


@pytest.fixture
def store(stand_in: StandIn) -> Store:
    return stand_in.emptied()


@pytest.fixture
def push(stand_in: StandIn, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Push:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "training.yaml").write_text(RULES)
    monkeypatch.setattr("strata.monitoring.prometheus.server.rules_dir", lambda: tmp_path / "rules")
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    app = typer.Typer()
    app.command()(commands.dashboards_push)

    def run(
        *arguments: str,
        url: str = stand_in.url,
        token: str | None = ADMIN,
        prometheus: str | None = PROMETHEUS,
        answer: str | None = None,
    ) -> Result:
        given = ["--url", url, *(["--token", token] if token else []), *(["--prometheus-url", prometheus] if prometheus else [])]
        return CliRunner().invoke(app, [*given, *arguments], input=answer)

    return run


def error_of(result: Result) -> UserError:
    assert isinstance(result.exception, UserError), (result.exception, result.output)
    for secret in (ADMIN, VIEWER):
        assert secret not in str(result.exception) + result.output
    return result.exception


def test_first_push_creates_everything(push: Push, store: Store) -> None:
    result = push("--yes")
    assert result.exit_code == 0, result.exception
    assert result.output.count("new ") == 2 + len(boards.every()) + 1
    assert store.folders["strata"]["title"] == "Strata"
    assert store.sources["strata-prometheus"]["url"] == PROMETHEUS
    assert set(store.boards) == {board.uid for board in boards.every()}
    assert all(board["meta"]["folderUid"] == "strata" for board in store.boards.values())
    assert store.boards["strata-training"]["dashboard"]["title"] == "Strata: Training"
    assert ADMIN not in result.output


def test_second_push_changes_nothing(push: Push, store: Store) -> None:
    push("--yes")
    store.writes.clear()
    result = push("--yes")
    assert result.exit_code == 0
    assert "Nothing to do" in result.output and "changed" not in result.output
    assert store.writes == []


def test_boards_migrated_by_grafana_are_unchanged(push: Push, store: Store) -> None:
    push("--yes")
    for board in store.boards.values():
        board["dashboard"]["schemaVersion"] = 42  # as newer Grafanas do when they store a board
    assert "Nothing to do" in push("--yes").output


def test_version_history_of_grafana_10(push: Push, store: Store) -> None:
    store.bare_history = True
    store.version = "10.4.2"
    push("--yes")
    assert "Nothing to do" in push("--yes").output


def test_alert_rules_fire_per_series_and_show_its_value(push: Push, store: Store) -> None:
    push("--yes")
    group = store.groups["strata", "strata training"]
    assert group["interval"] == 20  # Grafana evaluates at multiples of ten seconds
    [rule] = group["rules"]
    assert (rule["uid"], rule["title"], rule["for"]) == ("strata-training-stalled", "StrataTrainingStalled", "1h30m")
    assert (rule["folderUID"], rule["ruleGroup"], rule["noDataState"]) == ("strata", "strata training", "OK")
    query, exists, above = (node["model"] for node in rule["data"])
    assert query["expr"] == "changes(step[15m]) == 0" and query["instant"]
    assert exists["expression"] == "is_number($A) || is_nan($A) || is_inf($A)"
    assert rule["condition"] == above["refId"] == "C" and above["expression"] == exists["refId"]
    assert rule["labels"] == {"severity": "critical"}
    assert rule["annotations"]["description"] == "{{ $values.A.Value | humanize }} steps left"
    assert rule["annotations"]["summary"] == "{{ $labels.run }} stands still"


def test_changes_are_shown_as_a_diff(push: Push, store: Store, tmp_path: Path) -> None:
    push("--yes")
    (tmp_path / "rules" / "training.yaml").write_text(RULES.replace("90m", "5m"))
    old = f"{MESSAGE} 0123456789abcdef"
    store.boards["strata-serving"]["dashboard"]["description"] = "Description of an older version."
    store.history["strata-serving"][0]["message"] = old
    result = push("--yes", prometheus="http://elsewhere:9090")
    assert result.exit_code == 0, result.exception
    assert '-  "url": "http://prometheus:9090"' in result.output and '+  "url": "http://elsewhere:9090"' in result.output
    assert '-  "description": "Description of an older version.",' in result.output
    assert '"for": "5m"' in result.output and '"for": "1h30m"' in result.output
    assert result.output.count("done:") == 3
    assert store.boards["strata-serving"]["dashboard"]["version"] == 2
    assert store.history["strata-serving"][0]["message"] not in (old, "")
    assert "Nothing to do" in push("--yes", prometheus=None).output


def test_a_dry_run_writes_nothing(push: Push, store: Store) -> None:
    result = push("--dry-run")
    assert result.exit_code == 0
    assert "nothing was written" in result.output
    assert store.writes == []


def test_push_needs_confirmation(push: Push, store: Store) -> None:
    assert "--yes" in error_of(push()).fix
    assert store.writes == []


@pytest.mark.parametrize(("answer", "writes"), [("y\n", True), ("n\n", False)])
def test_confirmation_is_respected(push: Push, store: Store, monkeypatch: pytest.MonkeyPatch, answer: str, writes: bool) -> None:
    monkeypatch.setattr(commands, "_is_interactive", lambda: True)
    result = push(answer=answer)
    assert "Push 8 changes?" in result.output
    assert bool(store.writes) == writes


@pytest.mark.slow
def test_manual_changes_are_not_overwritten(push: Push, store: Store) -> None:
    push("--yes")
    store.edit_by_hand("strata-training", "a better title")
    store.writes.clear()
    refused = push("--yes")
    error = error_of(refused)
    assert "Strata: Training: version 2 by editor (a better title)" in error.cause and "--overwrite" in error.fix
    assert '-      "title": "Mine"' in refused.output
    assert store.writes == []
    assert push("--yes", "--overwrite").exit_code == 0
    assert store.boards["strata-training"]["dashboard"]["panels"][1]["title"] != "Mine"
    assert store.boards["strata-training"]["dashboard"]["version"] == 3


def test_concurrent_change_is_a_conflict(push: Push, store: Store) -> None:
    push("--yes")
    store.boards["strata-oncall"]["dashboard"]["description"] = "Description of an older version."
    store.history["strata-oncall"][0]["message"] = f"{MESSAGE} 0123456789abcdef"
    store.before_write = lambda: store.edit_by_hand("strata-oncall")
    error = error_of(push("--yes"))
    assert "(412)" in error.cause and "changed by someone else" in error.cause
    assert "Push again" in error.fix
    assert store.boards["strata-oncall"]["dashboard"]["panels"][1]["title"] == "Mine"


def test_manual_rules_are_not_overwritten(push: Push, store: Store) -> None:
    push("--yes")
    group = store.groups["strata", "strata training"]
    group["rules"].append({**group["rules"][0], "uid": "abc", "title": "Ours", "provenance": ""})
    assert "rules created manually: Ours" in error_of(push("--yes")).cause
    assert push("--yes", "--overwrite").exit_code == 0
    assert len(store.groups["strata", "strata training"]["rules"]) == 1


def test_obsolete_rule_is_listed_and_not_deleted(push: Push, store: Store, tmp_path: Path) -> None:
    push("--yes")
    (tmp_path / "rules" / "training.yaml").write_text(RULES.replace("strata training", "runs").replace("Stalled", "Slow"))
    result = push("--yes")
    assert "left    alert StrataTrainingStalled: in no rule file any more" in result.output
    assert ("strata", "strata training") in store.groups


def test_without_alerts(push: Push, store: Store) -> None:
    assert push("--yes", "--no-alerts").exit_code == 0
    assert store.groups == {} and len(store.boards) == len(boards.every())


@pytest.mark.slow
def test_existing_folder_is_used_and_a_new_title_creates_one(push: Push, store: Store) -> None:
    store.folders["x1"] = {"id": 1, "uid": "x1", "title": "LLM boards", "version": 4}
    assert push("--yes", "--folder", "LLM boards").exit_code == 0
    assert set(store.folders) == {"x1"} and store.boards["strata-oncall"]["meta"]["folderUid"] == "x1"
    assert push("--yes").exit_code == 0  # moves the boards
    assert store.boards["strata-oncall"]["meta"]["folderUid"] == "strata"


def test_renamed_folder_gets_its_title_back(push: Push, store: Store) -> None:
    push("--yes")
    store.folders["strata"] |= {"title": "Old things", "version": 5}
    result = push("--yes")
    assert '-  "title": "Old things"' in result.output
    assert store.folders["strata"] == {"id": 1, "uid": "strata", "title": "Strata", "version": 6}


def test_other_data_source_settings_are_preserved(push: Push, store: Store) -> None:
    push("--yes")
    store.sources["strata-prometheus"]["jsonData"]["customQueryParameters"] = "max_source_resolution=5m"
    push("--yes", prometheus="http://elsewhere:9090")
    assert store.sources["strata-prometheus"]["jsonData"]["customQueryParameters"] == "max_source_resolution=5m"
    assert store.sources["strata-prometheus"]["url"] == "http://elsewhere:9090"


def test_provisioned_data_source_is_not_changed(push: Push, store: Store) -> None:
    store.sources["strata-prometheus"] = {"uid": "strata-prometheus", "name": "Strata", "url": "http://there", "readOnly": True}
    result = push("--yes")
    assert result.exit_code == 0
    assert "left    data source strata-prometheus: provisioned from a file" in result.output
    assert store.sources["strata-prometheus"]["url"] == "http://there"


def test_first_push_needs_prometheus_url(push: Push, store: Store) -> None:
    assert "--prometheus-url" in error_of(push("--yes", prometheus=None)).fix
    assert store.writes == []


def test_data_source_name_in_use(push: Push, store: Store) -> None:
    store.sources["other"] = {"uid": "other", "name": "Strata", "url": "http://there"}
    assert "(409)" in error_of(push("--yes")).cause


def test_provisioned_boards_are_rejected(push: Push, store: Store) -> None:
    push("--yes")
    store.boards["strata-cluster"]["meta"] |= {"provisioned": True, "provisionedExternalId": "cluster.json"}
    error = error_of(push("--yes"))
    assert "cluster.json" in error.cause and "file" in error.fix


def test_provisioned_alert_rules_are_rejected(push: Push, store: Store) -> None:
    push("--yes")
    store.groups["strata", "strata training"]["rules"][0]["provenance"] = "file"
    assert "--no-alerts" in error_of(push("--yes")).fix


def test_token_from_the_environment(push: Push, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", ADMIN)
    assert push("--yes", token=None).exit_code == 0


@pytest.mark.parametrize(("token", "status"), [("no-such-one", "(401)"), (VIEWER, "(403)")])
def test_tokens_without_access(push: Push, token: str, status: str) -> None:
    error = error_of(push("--yes", token=token))
    assert status in error.cause and "Service accounts" in error.fix
    assert token not in str(error)


@pytest.mark.parametrize("token", [None, "two words", "line\nbreak", "Ünicode"])
def test_invalid_tokens(push: Push, token: str | None) -> None:
    error = error_of(push("--yes", token=token))
    assert "GRAFANA_TOKEN" in error.fix
    assert token is None or token not in str(error)


@pytest.mark.parametrize("url", ["127.0.0.1:3000", "ftp://host", "http://", "http://admin:secret@host", "http://host:port"])
def test_invalid_addresses(push: Push, url: str) -> None:
    assert "secret" not in str(error_of(push("--yes", url=url)))


def test_grafana_below_a_path(push: Push, store: Store, stand_in: StandIn) -> None:
    store.prefix = "/grafana"
    assert push("--yes", url=f"{stand_in.url}/grafana").exit_code == 0
    assert push("--yes", url=f"{stand_in.url}/grafana/").exit_code == 0
    assert "Grafana's path" in error_of(push("--yes")).fix


def test_no_server(push: Push) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        error = error_of(push("--yes", url=f"http://127.0.0.1:{held.getsockname()[1]}"))
    assert "No response" in error.cause


def test_server_without_tls(push: Push, stand_in: StandIn) -> None:
    error = error_of(push("--yes", url=f"https://{stand_in.address}"))
    assert "TLS connection" in error.cause and "REQUESTS_CA_BUNDLE" in error.fix


@pytest.mark.parametrize("answer", ["<html>Sign in</html>", {"status": "up"}, [], {"version": 3}])
def test_server_that_is_not_grafana(push: Push, store: Store, answer: object) -> None:
    store.broken = (200, answer)
    assert "is not Grafana" in error_of(push("--yes")).cause


def test_grafana_server_error(push: Push, store: Store) -> None:
    store.broken = (500, {"message": f"database is locked for {ADMIN}"})
    error = error_of(push("--yes"))
    assert "database is locked for (token)" in error.cause and "its log" in error.fix


def test_grafana_too_old(push: Push, store: Store) -> None:
    store.version = "9.5.2"
    assert "Grafana 10" in error_of(push("--yes")).fix


def test_token_is_not_in_repr(stand_in: StandIn) -> None:
    assert ADMIN not in repr(vars(Grafana(stand_in.url, ADMIN))["_api"])


def test_command_module_does_not_import_grafana_packages() -> None:
    heavy = "{'requests', 'grafana_client', 'grafana_foundation_sdk'}"
    probe = f"import sys, strata.dashboards.commands; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True)
