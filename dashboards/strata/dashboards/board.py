"""A dashboard: rows of panels, with shared variables, annotations and links."""

import json
from collections.abc import Iterator, Sequence
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
EVENT_STEP = "1m"  # resolution of annotations

REPLICAS = metrics.SERVE_REPLICAS.exported
NODES = series.NODE_CPUS.exported
VARIABLES = {
    "cluster": f'label_values({{__name__=~"{NODES}|{REPLICAS}"}}, cluster)',
    "ray_cluster": f'label_values({{__name__=~"{NODES}|{REPLICAS}", cluster=~"$cluster"}}, ray_io_cluster)',
    "team": f'label_values({{__name__=~"{NODES}|{series.TEAM_GPUS.exported}", cluster=~"$cluster|nodes"}}, namespace)',
    "node": f'label_values({{__name__=~"{NODES}|{series.NODE_GPUS.exported}", namespace=~"$team"}}, node)',
    "run": f'label_values({metrics.TRAIN_STEP.exported}{{cluster=~"$cluster"}}, run)',
    "model": f'label_values({REPLICAS}{{cluster=~"$cluster"}}, model)',
    "replica": f'label_values({REPLICAS}{{cluster=~"$cluster", model=~"$model", role!="gateway"}}, replica)',
}
NAMES = {"ray_cluster": "Ray cluster"}  # variables that are not called as they are spelled


@dataclass(frozen=True)
class Annotation:
    """Marks on the time axis of every panel, wherever the query returns a value."""

    name: str
    expr: str
    text: str
    colour: str


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    description: str
    variables: tuple[str, ...]
    rows: tuple[Row, ...]
    since: str = "now-1h"
    annotations: tuple[Annotation, ...] = ()

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
        for annotation in self.annotations:
            made.annotation(_annotation(annotation))
        for row in self.rows:
            heading = builders.Row(row.title)
            if row.collapsed:
                for panel in row.panels:
                    heading.with_panel(panel.builder())  # Grafana requires the panels of a collapsed row inside it
            made.with_row(heading)
            for panel in () if row.collapsed else row.panels:
                made.with_panel(panel.builder())
        board = made.build()
        board.schema_version = SCHEMA
        for number, part in enumerate(_flat(board.panels or []), start=1):
            part.id_val = number  # stable ids, so that links to a panel survive a rebuild
        plain: dict[str, Any] = json.loads(json.dumps(board, cls=JSONEncoder))
        for link in plain["links"]:
            del link["placement"]  # the SDK's default hides links in a menu
        for annotation in plain["annotations"].get("list", []):
            del annotation["placement"]
        return plain

    def panel_id(self, panel: Panel) -> int:
        """The id of a panel in the JSON. Rows count too."""
        order = [part for row in self.rows for part in (row, *row.panels)]
        return order.index(panel) + 1


def _flat(parts: Sequence[Any]) -> Iterator[Any]:
    for part in parts:
        yield part
        yield from _flat(getattr(part, "panels", None) or [])


def row(title: str, *panels: Panel, collapsed: bool = False) -> Row:
    return Row(title, panels, collapsed)


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
        .label(NAMES.get(name, name.capitalize()))
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


def _annotation(annotation: Annotation) -> builders.AnnotationQuery:
    return (
        builders.AnnotationQuery()
        .name(annotation.name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(annotation.colour)
        .expr(annotation.expr)
        .step(EVENT_STEP)
        .title_format(annotation.name)
        .text_format(annotation.text)
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
