"""Pushes folder, data source, dashboards and alert rules to Grafana: first a plan, then the changes.

A dashboard is saved with a version message that contains its digest. The newest message shows whether the dashboard in Grafana
is current (no change), an older version of Strata's (a change to show), or edited by a user, which is overwritten only with
`--overwrite`. Alert rules have no history, but Grafana marks rules from its provisioning API and does not allow editing them.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from strata.dashboards import boards
from strata.dashboards.alert_panels import with_panels
from strata.dashboards.alert_rules import Group
from strata.dashboards.board import DATA_SOURCE, Board
from strata.dashboards.generate import board_text
from strata.dashboards.grafana import Grafana, Json
from strata.platform.errors import UserError

MESSAGE = "strata dashboards push"


@dataclass(frozen=True)
class Step:
    """An object in Grafana and the call that updates it. `theirs` describes changes by users that would be lost."""

    state: Literal["new", "changed", "same", "left"]
    what: str
    do: Callable[[], None] | None = None
    diff: str = ""
    note: str = ""
    theirs: str = ""


@dataclass(frozen=True)
class Wanted:
    folder: str
    prometheus_url: str | None
    alerts: tuple[Group, ...]


def plan(grafana: Grafana, wanted: Wanted) -> list[Step]:
    """Plans the steps of a push in order. It only reads."""
    grafana.version()
    folder, folder_uid = _folder(grafana, wanted.folder)
    steps = [folder, _data_source(grafana, wanted.prometheus_url)]
    steps += [_board(grafana, board, folder_uid) for board in boards.every()]
    if wanted.alerts:
        steps += [_alerts(grafana, group, folder_uid) for group in wanted.alerts]
        steps += _left_over(grafana, wanted.alerts, folder_uid)
    return steps


def refuse_losses(steps: list[Step]) -> None:
    losses = [f"{step.what}: {step.theirs}" for step in steps if step.theirs]
    if losses:
        raise UserError(
            "These objects were changed manually in Grafana, and a push would overwrite them:\n  " + "\n  ".join(losses),
            "Save a copy under another name in Grafana, or move the change into the code, then push with --overwrite.",
        )


def _folder(grafana: Grafana, title: str) -> tuple[Step, str]:
    uid = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "strata"
    what = f"folder {title}"
    for folder in grafana.folders():
        if folder["title"] == title:
            return Step("same", what), folder["uid"]
    if renamed := grafana.folder(uid):
        rename = _then(grafana.rename_folder, uid, title, renamed["version"])
        return Step("changed", what, rename, _diff({"title": renamed["title"]}, {"title": title})), uid
    return Step("new", what, _then(grafana.create_folder, title, uid)), uid


def _data_source(grafana: Grafana, url: str | None) -> Step:
    what = f"data source {DATA_SOURCE}"
    there = grafana.data_source(DATA_SOURCE)
    if url is None and there is None:
        raise UserError(
            f"Grafana has no data source {DATA_SOURCE} yet.",
            "Set --prometheus-url to the URL of Prometheus as seen from Grafana, such as http://prometheus:9090.",
        )
    if url is None:
        return Step("same", what)
    settings = {"httpMethod": "POST", "timeInterval": "15s"}
    ours = {
        "uid": DATA_SOURCE,
        "name": "Strata",
        "type": "prometheus",
        "access": "proxy",
        "url": url.rstrip("/"),
        "jsonData": settings,
    }
    if there is None:
        return Step("new", what, _then(grafana.create_data_source, ours))
    if there.get("readOnly"):
        return Step("left", what, note="provisioned from a file on Grafana's machine")
    seen = _shaped(there, ours)
    if seen == ours:
        return Step("same", what)
    merged = {**there, **ours, "jsonData": {**(there.get("jsonData") or {}), **settings}}
    return Step("changed", what, _then(grafana.update_data_source, DATA_SOURCE, merged), _diff(seen, ours))


def _board(grafana: Grafana, board: Board, folder_uid: str) -> Step:
    what = f"dashboard {board.title}"
    text = board_text(board)
    ours = json.loads(text)
    message = f"{MESSAGE} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    body = {"dashboard": {**ours, "id": None, "version": 0}, "folderUid": folder_uid, "message": message, "overwrite": False}
    there = grafana.board(board.uid)
    if there is None:
        return Step("new", what, _then(grafana.save_board, body))
    meta = there["meta"]
    if meta.get("provisioned"):
        raise UserError(
            f"{what!r} is provisioned from a file on Grafana's machine ({meta.get('provisionedExternalId') or 'unnamed'}).",
            "Replace that file by the one in dashboards/generated, or remove the file and push again.",
        )
    [newest, *_] = grafana.board_versions(board.uid) or [{}]
    moved = meta.get("folderUid") != folder_uid
    seen = {key: value for key, value in there["dashboard"].items() if key not in ("id", "version")}
    is_current = newest.get("message") == message or seen == ours
    if is_current and not moved:
        return Step("same", what)
    # Names the version that was read: Grafana rejects the save if another one happened in between.
    body["dashboard"] = {**ours, "id": there["dashboard"]["id"], "version": there["dashboard"]["version"]}
    theirs = ""
    if not is_current and not str(newest.get("message", "")).startswith(MESSAGE):
        by, comment = newest.get("createdBy") or "someone", newest.get("message") or "no message"
        theirs = f"version {there['dashboard']['version']} by {by} ({comment})"
    diff = _diff({"folder": meta.get("folderUid"), **seen}, {"folder": folder_uid, **ours})
    return Step("changed", what, _then(grafana.save_board, body), diff, theirs=theirs)


def _alerts(grafana: Grafana, group: Group, folder_uid: str) -> Step:
    what = f"alerts {group.name} ({len(group.rules)})"
    ours = with_panels(group.json(folder_uid))
    save = _then(grafana.save_alert_group, folder_uid, ours)
    there = grafana.alert_group(folder_uid, group.name)
    if there is None or not there.get("rules"):
        return Step("new", what, save)
    origins = {rule["title"]: rule.get("provenance", "") for rule in there["rules"]}
    if elsewhere := sorted(title for title, origin in origins.items() if origin not in ("", "api")):
        raise UserError(
            f"Alert rules are provisioned from a file on Grafana's machine: {', '.join(elsewhere)}.",
            "Push with --no-alerts, or remove the file and push again.",
        )
    wanted = {rule["uid"]: rule for rule in ours["rules"]}
    rules = [_shaped(rule, wanted.get(rule["uid"], {"uid": "", "title": ""})) for rule in there["rules"]]
    seen = {**_shaped(there, ours), "rules": sorted(rules, key=_uid)}
    ours = {**ours, "rules": sorted(ours["rules"], key=_uid)}
    if seen == ours:
        return Step("same", what)
    by_hand = sorted(title for title, origin in origins.items() if origin == "")
    return Step(
        "changed", what, save, _diff(seen, ours), theirs=f"rules created manually: {', '.join(by_hand)}" if by_hand else ""
    )


def _left_over(grafana: Grafana, groups: tuple[Group, ...], folder_uid: str) -> list[Step]:
    """Strata rules in Grafana that no rule file contains any more. They are listed, not deleted."""
    names = {group.name for group in groups}
    wanted = {rule["uid"] for group in groups for rule in group.rules}
    return [
        Step("left", f"alert {rule['title']}", note="in no rule file any more; delete it in Grafana")
        for rule in grafana.alert_rules()
        if rule["folderUID"] == folder_uid and rule["uid"].startswith("strata-")
        if rule["ruleGroup"] not in names and rule["uid"] not in wanted
    ]


def _then(call: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: call(*arguments)


def _shaped(there: Any, ours: Any) -> Any:
    """Grafana's object reduced to the keys of ours: Grafana adds ids, times and defaults."""
    if isinstance(there, dict) and isinstance(ours, dict):
        return {key: _shaped(there[key], ours[key]) for key in ours if key in there}
    if isinstance(there, list) and isinstance(ours, list) and len(there) == len(ours):
        return [_shaped(one, other) for one, other in zip(there, ours, strict=True)]
    return there


def _uid(rule: Json) -> str:
    return str(rule["uid"])


def _diff(there: Json, ours: Json) -> str:
    before, after = (json.dumps(side, indent=2, sort_keys=True, ensure_ascii=False).splitlines() for side in (there, ours))
    return "\n".join(difflib.unified_diff(before, after, "in Grafana", "new", lineterm="", n=2))
