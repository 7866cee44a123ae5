"""Tables of the planner's errors: `strata plan validate`, and the errors by regime."""

import json

from docgen.markdown import bold, signed, table
from docgen.record import Run
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
