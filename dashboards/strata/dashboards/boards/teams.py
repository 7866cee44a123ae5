"""Teams board: GPU-hours, idle GPU-hours, energy and cost of each namespace and Ray cluster."""

from strata.dashboards import series
from strata.dashboards.board import Board, even, row
from strata.dashboards.boards.annotations import DEPLOYMENTS
from strata.dashboards.panels import Line, Panel, bars, lines, number
from strata.dashboards.promql import most, over_range, select, summed
from strata.dashboards.series import Series
from strata.dashboards.style import IDLE, Unit

TEAM = ("cluster", "namespace")
EACH_TEAM = "{{namespace}}"
RAY_CLUSTER = (*TEAM, "ray_io_cluster")
EACH_RAY_CLUSTER = "{{namespace}} {{ray_io_cluster}}"
NAMED, UNNAMED = 'namespace!=""', 'namespace=""'
# The rule that teams.yaml counts by.
IDLE_RULE = "A GPU is idle while its mean utilization of the last 5 minutes is under 5%."
PRICES = "Prices per GPU-hour are those of infra/prometheus/prices.yaml."


def amounts(title: str, description: str, unit: Unit, what: Series) -> tuple[Panel, Panel]:
    """The largest amounts in the time range, by team and by Ray cluster."""
    return (
        bars(f"{title} by team", description, unit, Line(most(over_range(what, *TEAM)), EACH_TEAM)),
        bars(f"{title} by Ray cluster", description, unit, Line(most(over_range(what, *RAY_CLUSTER)), EACH_RAY_CLUSTER)),
    )


HOURS = amounts("GPU-hours", "GPU-hours that pods held, in the time range.", Unit.GPU_HOURS, series.TEAM_GPU_HOURS)
IDLE_HOURS = amounts("Idle GPU-hours", IDLE_RULE, Unit.GPU_HOURS, series.TEAM_IDLE_HOURS)
ENERGY = amounts("Energy", "Energy of the GPUs in the time range, without hosts and cooling.", Unit.ENERGY, series.TEAM_ENERGY)
COST = amounts("Cost", f"Cost of the GPUs in the time range. {PRICES}", Unit.DOLLARS, series.TEAM_COST)
IDLE_COST = amounts("Idle cost", f"Cost of idle GPUs in the time range. {IDLE_RULE}", Unit.DOLLARS, series.TEAM_IDLE_COST)

SUMMARY = row(
    "Now",
    *even(
        4,
        (
            number(
                "GPUs in use",
                "GPUs that pods of a team hold.",
                Unit.COUNT,
                Line(f"sum({select(series.TEAM_GPUS, NAMED)})", "GPUs"),
                empty="none",
            ),
            number(
                "GPUs of no team",
                "GPUs that no pod holds.",
                Unit.COUNT,
                Line(f"sum({select(series.TEAM_GPUS, UNNAMED)})", "GPUs"),
                empty="none",
            ),
            number(
                "Idle share",
                IDLE_RULE,
                Unit.RATIO,
                Line(f"sum({select(series.TEAM_IDLE_GPUS)}) / sum({select(series.TEAM_GPUS)})", "idle"),
                IDLE,
                empty="no GPU",
            ),
            number(
                "Power",
                "Power draw of the GPUs.",
                Unit.WATTS,
                Line(f"sum({select(series.TEAM_POWER)})", "drawn"),
                empty="no GPU",
            ),
            number(
                "Cost",
                f"Cost of all GPUs per hour. {PRICES}",
                Unit.DOLLARS_PER_HOUR,
                Line(f"sum({select(series.TEAM_COST_RATE)})", "cost"),
                empty="no GPU",
            ),
            number(
                "Cost of idle GPUs",
                f"Cost of idle GPUs per hour. {IDLE_RULE}",
                Unit.DOLLARS_PER_HOUR,
                Line(f"sum({select(series.TEAM_IDLE_COST_RATE)})", "cost"),
                empty="no GPU",
            ),
        ),
    ),
)

TEAMS = row(
    "Teams, in the time range",
    *even(8, (HOURS[0], IDLE_HOURS[0], IDLE_COST[0])),
    *even(12, (COST[0], ENERGY[0])),
)

COURSE = row(
    "Teams over time",
    lines(
        "GPUs by team",
        "GPUs that the pods of each team hold.",
        Unit.COUNT,
        Line(summed(series.TEAM_GPUS, *TEAM), EACH_TEAM),
        stacked=True,
    ),
    lines("Idle GPUs by team", IDLE_RULE, Unit.COUNT, Line(summed(series.TEAM_IDLE_GPUS, *TEAM), EACH_TEAM), stacked=True),
    lines(
        "Power by team",
        "Power draw of the GPUs of each team.",
        Unit.WATTS,
        Line(summed(series.TEAM_POWER, *TEAM), EACH_TEAM),
        stacked=True,
    ),
    lines(
        "Cost of idle GPUs by team",
        f"Cost per hour. {IDLE_RULE}",
        Unit.DOLLARS_PER_HOUR,
        Line(summed(series.TEAM_IDLE_COST_RATE, *TEAM), EACH_TEAM),
        stacked=True,
    ),
)

CLUSTERS = row(
    "Ray clusters, in the time range",
    *even(8, (HOURS[1], IDLE_HOURS[1], IDLE_COST[1])),
    *even(12, (COST[1], ENERGY[1])),
    collapsed=True,
)

BOARD = Board(
    uid="strata-teams",
    title="Strata: Teams and cost",
    description="GPU-hours, idle GPU-hours, energy and cost by team and Ray cluster.",
    variables=("cluster", "ray_cluster", "team"),
    rows=(SUMMARY, TEAMS, COURSE, CLUSTERS),
    since="now-24h",
    annotations=(DEPLOYMENTS,),
)
