"""Panel types: time series, number, bars, heatmap, table, alert list.

Widths are in Grafana's columns, 24 per line. `board.py` places panels one after another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from grafana_foundation_sdk.builders import bargauge, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import prometheus as prometheus_builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from strata.dashboards import alert_links
from strata.dashboards.style import COLOURS, PLAIN, Limits, Unit

SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
NUMBER_HEIGHT = 4

Kind = Literal["lines", "number", "bars", "heat", "table", "alerts"]


@dataclass(frozen=True)
class Line:
    """A query and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Settings of a panel of any kind."""

    title: str
    description: str
    unit: Unit
    lines: tuple[Line, ...]
    kind: Kind = "lines"
    width: int = 12
    limits: Limits | None = None
    stacked: bool = False
    logarithmic: bool = False
    top: float | None = None
    empty: str = "-"  # text of a number panel without data
    alerts: tuple[str, ...] = ()  # alerts on the panel's values; the panel links to their runbooks

    def wide(self, width: int) -> "Panel":
        return replace(self, width=width)

    def about(self, *alerts: str) -> "Panel":
        return replace(self, alerts=alerts)

    def is_instant(self) -> bool:
        """True if the panel reads the last values only, and not their course."""
        return self.kind in ("bars", "table")

    def builder(self) -> Builder[dashboard.Panel]:
        return DRAWN_BY[self.kind](self)


def lines(
    title: str,
    description: str,
    unit: Unit,
    *queries: Line,
    limits: Limits | None = None,
    stacked: bool = False,
    logarithmic: bool = False,
    top: float | None = None,
) -> Panel:
    return Panel(title, description, unit, queries, limits=limits, stacked=stacked, logarithmic=logarithmic, top=top)


def number(title: str, description: str, unit: Unit, query: Line, limits: Limits | None = None, empty: str = "-") -> Panel:
    return Panel(title, description, unit, (query,), "number", 4, limits, empty=empty)


def bars(
    title: str, description: str, unit: Unit, *queries: Line, limits: Limits | None = None, top: float | None = None
) -> Panel:
    return Panel(title, description, unit, queries, "bars", limits=limits, top=top)


def heat(title: str, description: str, expr: str, unit: Unit = Unit.SECONDS) -> Panel:
    return Panel(title, description, unit, (Line(expr, "{{le}}"),), "heat")


def table_of(title: str, description: str, expr: str) -> Panel:
    return Panel(title, description, Unit.NONE, (Line(expr, ""),), "table")


def alert_list(title: str, description: str) -> Panel:
    """Grafana's alert list: alerts of its own rules, and those of Prometheus if the data source may read them."""
    return Panel(title, description, Unit.NONE, (), "alerts")


def _lines(panel: Panel) -> Builder[dashboard.Panel]:
    made = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(40 if panel.stacked else 8)
        .show_points(common.VisibilityMode.AUTO)
        .span_nulls(60_000)  # milliseconds: joins the line over a missed scrape, not over a dead process
        .color_scheme(_colour(dashboard.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    )
    if panel.stacked:
        made.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if panel.logarithmic:
        made.scale_distribution(common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    else:
        made.axis_soft_min(0)
    if panel.limits is not None:
        made.thresholds_style(common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))
    for line in panel.lines:
        for word, colour in COLOURS.get(line.legend.split(" ")[-1], {}).items():
            fixed = dashboard.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
            made.override_by_regexp(f"/(^| ){word}$/", [fixed])
    return _common(panel, made)


def _number(panel: Panel) -> Builder[dashboard.Panel]:
    made = (
        stat.Panel()
        .color_mode(common.BigValueColorMode.BACKGROUND if panel.limits else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_scheme(_colour(dashboard.FieldColorModeId.THRESHOLDS))
        .no_value(panel.empty)
        .mappings([_nan_as(panel.empty)])
    )
    return _common(panel, made)


def _bars(panel: Panel) -> Builder[dashboard.Panel]:
    made = (
        bargauge.Panel()
        .display_mode(common.BarGaugeDisplayMode.GRADIENT)
        .orientation(common.VizOrientation.HORIZONTAL)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_scheme(_colour(dashboard.FieldColorModeId.THRESHOLDS))
        .min(0)
    )
    return _common(panel, made)


def _heat(panel: Panel) -> Builder[dashboard.Panel]:
    made = (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .color(
            heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64).exponent(0.5)
        )
        .cell_gap(1)
        .show_legend()
    )
    return _common(panel, made)


def _table(panel: Panel) -> Builder[dashboard.Panel]:
    """Table with one row per series and one column per label."""
    unread = ("Time", "Value", "__name__", "alertstate", "instance", "job")
    hide = dashboard.DataTransformerConfig(
        id_val="organize", options={"excludeByName": dict.fromkeys(unread, True), "indexByName": {"severity": 0, "alertname": 1}}
    )
    links = dashboard.DynamicConfigValue(
        "links", [{"title": title, "url": url} for title, url in alert_links.OF_AN_ALERT.items()]
    )
    made = table.Panel().with_transformation(hide).filterable(True).no_value("nothing").override_by_name("alertname", [links])
    return _common(panel, made)


def _alerts(panel: Panel) -> Builder[dashboard.Panel]:
    states = {"firing": True, "pending": True, "error": True, "noData": False, "normal": False}
    options = {"viewMode": "list", "groupMode": "default", "maxItems": 20, "sortOrder": 1, "stateFilter": states}
    return _common(panel, dashboard_builders.Panel().type("alertlist").options(options))


DRAWN_BY: dict[Kind, Callable[[Panel], Builder[dashboard.Panel]]] = {
    "lines": _lines,
    "number": _number,
    "bars": _bars,
    "heat": _heat,
    "table": _table,
    "alerts": _alerts,
}


def _nan_as(text: str) -> dashboard.ValueMapping:
    """Shows `text` for NaN, the quantile of no observations."""
    result = dashboard.ValueMappingResult(text=text, color=PLAIN)
    options = dashboard.DashboardSpecialValueMapOptions(match=dashboard.SpecialValueMatch.NULL_AND_NAN, result=result)
    return dashboard.SpecialValueMap(options=options)


def _colour(mode: dashboard.FieldColorModeId) -> dashboard_builders.FieldColor:
    return dashboard_builders.FieldColor().mode(mode)


def _runbook(alert: str) -> dashboard_builders.DashboardLink:
    return (
        dashboard_builders.DashboardLink(f"Runbook: {alert}")
        .type(dashboard.DashboardLinkType.LINK)
        .url(alert_links.runbook(alert))
        .target_blank(True)
    )


AnyPanel = timeseries.Panel | stat.Panel | bargauge.Panel | heatmap.Panel | table.Panel | dashboard_builders.Panel


def _common(panel: Panel, made: AnyPanel) -> Builder[dashboard.Panel]:
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    made.height(NUMBER_HEIGHT if panel.kind == "number" else HEIGHT).span(panel.width)
    made.links([_runbook(alert) for alert in panel.alerts])
    if panel.top is not None:
        made.max(panel.top)
    steps = panel.limits.steps() if panel.limits else [dashboard.Threshold(value=None, color=PLAIN)]
    made.thresholds(dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
    for line, ref in zip(panel.lines, "ABCDEFGH", strict=False):
        query = prometheus_builders.Dataquery().datasource(SOURCE).expr(line.expr).legend_format(line.legend).ref_id(ref)
        if panel.is_instant():
            query.instant()
        else:
            query.range()
        if panel.kind == "heat":
            query.format(prometheus_models.PromQueryFormat.HEATMAP)
        if panel.kind == "table":
            query.format(prometheus_models.PromQueryFormat.TABLE)
        made.with_target(query)
    return made
