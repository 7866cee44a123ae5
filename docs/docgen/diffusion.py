"""Tables of `strata bench dit` and `strata plan dit --validate`."""

from statistics import median
from typing import Any

from docgen import kernels
from docgen.markdown import bold, number, signed, table
from docgen.record import Run

NAMES = DIFFUSERS, COMPILED, OURS = "diffusers", "diffusers + torch.compile", "strata"


def dit(run: Run) -> str:
    parts = []
    if run.get("pictures"):
        parts.append(
            "Seconds per picture, without text encoders and autoencoder. Ratios are Strata's speed; below 1 is **bold**."
        )
        parts.append(_pictures(run["pictures"]))
    if run.get("attention"):
        parts.append("Attention, forward. Ratios are Strata's speed over the peer's.")
        parts.append(kernels.operation("flash_attention", run["attention"]))
    if run.get("layouts"):
        parts.append(_layouts(run["layouts"]))
    parts += [f"Not run: {remark}." for remark in run.get("not_run") or ()]
    return "\n\n".join(parts)


def _pictures(rows: list[dict[str, Any]]) -> str:
    columns = ("model", "steps", *(f"`{name}`" for name in NAMES), f"`{OURS}` ÷ {COMPILED}")
    return table(columns, [_picture(row) for row in rows], numeric=1)


def _picture(row: dict[str, Any]) -> tuple[str, ...]:
    times = {name: _seconds(row["contenders"].get(name, {})) for name in NAMES}
    peer, ours = times[COMPILED], times[OURS]
    ratio = None if peer is None or ours is None else peer / ours
    return (
        row["model"],
        str(row["steps"]),
        *(number(one, ".3g", " s") for one in times.values()),
        "-" if ratio is None else bold(f"{ratio:.2f}", ratio < 1),
    )


def _seconds(contender: dict[str, Any]) -> float | None:
    return median(contender["seconds"]) if contender.get("seconds") else None


def _layouts(rows: list[dict[str, Any]]) -> str:
    alone = next((median(row["seconds"]) for row in rows if row["name"] == OURS and row["seconds"]), None)
    columns = ("layout", "workers", "s/picture", "pictures/s in a batch", "speedup", "latents")
    return table(columns, [_layout(row, alone) for row in rows], numeric=1)


def _layout(row: dict[str, Any], alone: float | None) -> tuple[str, ...]:
    if not row["seconds"]:
        return row["name"], str(row["workers"]), "**failed**", "-", "-", "-"
    seconds = median(row["seconds"])
    rate = row["batch"] / median(row["batch_seconds"]) if row["batch_seconds"] else None
    equal = row["psnr"] if isinstance(row["psnr"], str) else number(row["psnr"], ".1f", " dB")
    speedup = None if alone is None else alone / seconds
    return row["name"], str(row["workers"]), f"{seconds:.3g}", number(rate, ".2f"), number(speedup, ".2f"), equal


def published() -> str:
    """Figures of xDiT beside the planner's, and the errors."""
    from strata.planner.diffusion.validate import errors, published_rows

    rows = published_rows()
    columns = ("model", "GPU", "size", "layout", "published", "predicted", "error", "speedup", "predicted speedup")
    lines = [
        (
            row.model, row.gpu.upper(), f"{row.request.width} x {row.request.height}", row.layout.name(),
            f"{row.published:,.4g} s", f"{row.predicted:,.4g} s", signed(row.error),
            f"{row.published_speedup:.2f}", f"{row.predicted_speedup:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    seconds, speedup = errors([row.error for row in rows]), errors([row.speedup_error for row in rows if row.layout.workers > 1])
    summary = [
        f"{name}: mean {one.mean:.1%}, signed mean {signed(one.signed, 1)}, worst {signed(one.worst, 1)}."
        for name, one in (("Error of the seconds", seconds), ("Error of the speedup over one GPU", speedup))
    ]
    return "\n\n".join([table(columns, lines, numeric=4), " ".join(summary)])
