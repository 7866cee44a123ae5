"""Links from alerts in Grafana to the panels that show their values.

A panel names the alerts on its values with `Panel.about`.
"""

from typing import Any

from strata.dashboards import boards


def panels() -> dict[str, tuple[str, int]]:
    """UID of the dashboard and id of the panel that shows the values of an alert; the first one of several."""
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
