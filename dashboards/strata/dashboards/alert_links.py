"""Links between alerts, panels and runbooks.

A panel names the alerts on its values (`Panel.about`). It links to their runbooks, and an alert in Grafana links to the panel.
"""

from typing import Any

RUNBOOKS = "https://strata.example/docs/monitoring.md"

TIME = "${__url_time_range}"
CLUSTER = "var-cluster=${__data.fields.cluster}"
# Links of a row in the table of alerts, with its labels as variables of the board they lead to.
OF_AN_ALERT = {
    "Runbook": f"{RUNBOOKS}#${{__value.text}}",
    "Cluster board": f"/d/strata-cluster?{CLUSTER}&var-node=${{__data.fields.node}}&{TIME}",
    "Training board": f"/d/strata-training?{CLUSTER}&var-run=${{__data.fields.run}}&{TIME}",
    "Serving board": f"/d/strata-serving?{CLUSTER}&var-model=${{__data.fields.model}}&{TIME}",
}


def runbook(alert: str) -> str:
    return f"{RUNBOOKS}#{alert.lower()}"


def panels() -> dict[str, tuple[str, int]]:
    """UID of the dashboard and id of the panel that shows the values of an alert; the first one of several."""
    from strata.dashboards import boards

    found: dict[str, tuple[str, int]] = {}
    for board in boards.every():
        for panel in board.panels():
            for alert in panel.alerts:
                found.setdefault(alert, (board.uid, board.panel_id(panel)))
    return found


def with_panels(group: dict[str, Any]) -> dict[str, Any]:
    """A Grafana rule group whose rules name their panels, in the annotations that Grafana reads."""
    places = panels()

    def linked(rule: dict[str, Any]) -> dict[str, Any]:
        if (place := places.get(rule["title"])) is None:
            return rule
        uid, panel = place
        return {**rule, "annotations": {**rule["annotations"], "__dashboardUid__": uid, "__panelId__": str(panel)}}

    return {**group, "rules": [linked(rule) for rule in group["rules"]]}
