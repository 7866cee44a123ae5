"""Tables of the planner: errors of `strata plan validate` and by regime, and queue times of `strata plan queue`."""

import json

from docgen.markdown import bold, signed, table
from docgen.record import Run
from strata.planner.units import show
from strata.planner.validation import check_training
from strata.planner.validation.trust import ERRORS, REGIMES

FITTED = "dense models trained by Megatron with ZeRO 0 or 1, below 32k tokens; constants fitted to these figures"
NOT_FITTED = "figures not used to fit the planner"


def plan_validate(run: Run) -> str:
    rows = []
    for check in run["checks"]:
        figures = sum(len(rows) for rows in check["tables"].values())
        bars = [
            f"{kind} {bar:.0%}" for kind, bar in (("mean", check["mean_bar"]), ("worst", check["worst_bar"])) if bar is not None
        ]
        mean = f"{check['mean']:.1%}" + (" (geometric)" if check["mean_kind"] != "mean" else "")
        rows.append(
            (check["name"], str(figures), bold(mean, not check["passed"]), f"{check['worst']:.1%}", ", ".join(bars) or "none")
        )
    return table(("published figures", "count", "mean error", "worst error", "bar"), rows, numeric=1)


def regimes() -> str:
    """Mean error by regime, with the two ends."""
    seen = check_training.rows()
    errors = [row.error for row in seen if row.error is not None]
    rows = [(FITTED, len(errors), check_training.mean_error(seen), min(errors), max(errors))]
    for name, found in json.loads(ERRORS.read_text()).items():
        about = f"{REGIMES[name]}; {NOT_FITTED}" if name == "dense" else REGIMES[name]
        rows.append((about, found["figures"], found["mean"], found["lowest"], found["highest"]))
    shown = [(about, str(count), f"{mean:.1%}", signed(low), signed(high)) for about, count, mean, low, high in rows]
    return table(("regime", "figures", "mean error", "lowest", "highest"), shown, numeric=1) + (
        "\n\nA negative error is a predicted time (or memory) below the published one."
    )


def plan_queue(run: Run) -> str:
    """Queue times and use of the cluster by policy, then queue times by team. A first job that waits beyond its bound is bold."""
    found = run["policies"]
    times = ("mean wait", "p95", "p99", "longest")
    columns = ("policy", *times, "at head", "slowdown", "used", "fragments", "blocks", "preemptions")
    rows = [
        (
            name,
            *_waits(one["all"]),
            bold(show(one["at_head_s"], "s"), one["at_head_s"] > one["bound_s"]),
            f"{one['all']['slowdown']:.1f}",
            f"{one['utilisation']:.1%}",
            f"{one['fragmentation']:.1%}",
            f"{one['blocks']:.2f}",
            f"{one['preemptions']:,}",
        )
        for name, one in found.items()
    ]
    teams = [
        (name, team, f"{waits['jobs']:,}", f"{waits['gpu_hours']:,.0f}", *_waits(waits), f"{waits['slowdown']:.1f}")
        for name, one in found.items()
        for team, waits in one["teams"].items()
    ]
    quotas = ", ".join(f"{team['name']} {team['quota']:,}" for team in run["teams"])
    about = f"{run['jobs']:,} jobs ({run['source']}) on {run['gpus']:,} GPUs; quotas: {quotas}."
    by_team = table(("policy", "team", "jobs", "GPU-hours", *times, "slowdown"), teams, numeric=2)
    return f"{about}\n\n{table(columns, rows, numeric=1)}\n\n{by_team}"


def _waits(waits: dict[str, float]) -> list[str]:
    return [show(waits[name], "s") for name in ("mean_s", "p95_s", "p99_s", "longest_s")]
