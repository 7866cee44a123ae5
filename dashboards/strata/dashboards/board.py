"""A dashboard: rows of panels, with shared variables and links."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from strata.dashboards import series
from strata.dashboards.panels import SOURCE, Panel
from strata.platform import metrics

DATA_SOURCE = "strata-prometheus"
TAG = "strata"
# The schema of Grafana 10. Newer versions migrate an older dashboard when they load it; older versions cannot load a newer one.
SCHEMA = 39

REPLICAS = metrics.SERVE_REPLICAS.exported
VARIABLES = {
    "cluster": f'label_values({{__name__=~"{series.NODE_CPUS.exported}|{REPLICAS}"}}, cluster)',
    "run": f'label_values({metrics.TRAIN_STEP.exported}{{cluster=~"$cluster"}}, run)',
    "model": f'label_values({REPLICAS}{{cluster=~"$cluster"}}, model)',
    "replica": f'label_values({REPLICAS}{{cluster=~"$cluster", model=~"$model", role!="gateway"}}, replica)',
}


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    description: str
    variables: tuple[str, ...]
    rows: tuple[Row, ...]
    since: str = "now-1h"

    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    def json(self) -> dict[str, Any]:
        made = (
            builders.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags([TAG])
            .time(self.since, "now")
            .refresh("30s")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .with_variable(_data_source())
            .link(_other_boards())
        )
        for name in self.variables:
            made.with_variable(_variable(name))
        for row in self.rows:
            made.with_row(builders.Row(row.title))
            for panel in row.panels:
                made.with_panel(panel.builder())
        board = made.build()
        board.schema_version = SCHEMA
        for number, part in enumerate(board.panels or [], start=1):
            part.id_val = number  # stable ids, so that links to a panel survive a rebuild
        plain: dict[str, Any] = json.loads(json.dumps(board, cls=JSONEncoder))
        for link in plain["links"]:
            del link["placement"]  # the SDK's default hides links in a menu
        return plain


def row(title: str, *panels: Panel) -> Row:
    return Row(title, panels)


def even(width: int, panels: Sequence[Panel]) -> tuple[Panel, ...]:
    return tuple(panel.wide(width) for panel in panels)


def _data_source() -> builders.DatasourceVariable:
    """Data source variable. Defaults to Strata's; a user may choose another, such as the Prometheus of a cluster's Grafana."""
    return (
        builders.DatasourceVariable("datasource")
        .label("Prometheus")
        .type("prometheus")
        .current(models.VariableOption(text="Strata", value=DATA_SOURCE))
    )


def _variable(name: str) -> builders.QueryVariable:
    """Query variable with several values, which Grafana escapes and joins to a regular expression. "All" is `.*`, because a list
    of many runs would make the query too long."""
    return (
        builders.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query({"query": VARIABLES[name], "refId": name})
        .definition(VARIABLES[name])
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_CASE_INSENSITIVE_ASC)
    )


def _other_boards() -> builders.DashboardLink:
    return (
        builders.DashboardLink("Strata boards")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
        .as_dropdown(False)
    )
