"""Tables of `strata bench dit` in the terminal."""

import statistics
from typing import Any

from rich.table import Table

from strata.serving.diffusion.bench.contenders import COMPILED, DIFFUSERS, OURS
from strata.serving.diffusion.bench.models import PictureModel


def picture_table(row: dict[str, Any]) -> Table:
    table = _table(f"{row['model']}, {row['steps']} steps, without text encoders and autoencoder")
    for column in ("s/picture", "s/step", f"÷ {DIFFUSERS}", f"÷ {COMPILED}", "first run", "error"):
        table.add_column(column, justify="right")
    contenders = row["contenders"]
    for name, one in contenders.items():
        if not one["seconds"]:
            table.add_row(name, one["trouble"] or row["trouble"] or "-")
            continue
        seconds = statistics.median(one["seconds"])
        table.add_row(
            name,
            f"{seconds:.3f}",
            f"{seconds / row['steps']:.4f}",
            *(speed(contenders, name, peer) for peer in (DIFFUSERS, COMPILED)),
            f"{one['first_s']:.1f} s",
            "-" if one["error"] is None else f"{one['error']:.1e}",
        )
    if row["trouble"]:
        table.add_row(row["trouble"])
    return table


def speed(contenders: dict[str, Any], name: str, peer: str) -> str:
    """Speed relative to a peer: above 1, this one is faster."""
    times = [statistics.median(contenders[one]["seconds"]) for one in (peer, name) if contenders.get(one, {}).get("seconds")]
    return f"{times[0] / times[1]:.2f}" if len(times) == 2 and name != peer else "-"


def attention_table(cases: list[dict[str, Any]]) -> Table:
    table = _table("attention, forward")
    peers = list(dict.fromkeys(name for case in cases for name, one in case["contenders"].items() if one["ratio"] is not None))
    for column in ("ms", "TFLOP/s", *(f"÷ {peer}" for peer in peers)):
        table.add_column(column, justify="right")
    for case in cases:
        ours = case["contenders"].get(OURS, {})
        if ours.get("ms") is None:
            table.add_row(case["case"], ours.get("trouble") or case["trouble"] or "-")
            continue
        ratios = [case["contenders"].get(peer, {}).get("ratio") for peer in peers]
        rate = case["flops"] / ours["ms"] / 1e9
        table.add_row(case["case"], f"{ours['ms']:.3f}", f"{rate:.0f}", *("-" if one is None else f"{one:.2f}" for one in ratios))
    return table


def layouts_table(rows: list[dict[str, Any]], model: PictureModel) -> Table:
    table = _table(f"{model.name}, {model.size}px, {model.steps} steps")
    for column in ("workers", "s/picture", "pictures/s, batch", "÷ one worker", "PSNR"):
        table.add_column(column, justify="right")
    alone = next((statistics.median(row["seconds"]) for row in rows if row["name"] == OURS and row["seconds"]), None)
    for row in rows:
        if not row["seconds"]:
            table.add_row(row["name"], str(row["workers"]), row["trouble"] or "-")
            continue
        seconds = statistics.median(row["seconds"])
        rate = row["batch"] / statistics.median(row["batch_seconds"]) if row["batch_seconds"] else None
        psnr = "-" if row["psnr"] is None else "exact" if row["psnr"] == "exact" else f"{row['psnr']:.1f} dB"
        table.add_row(
            row["name"],
            str(row["workers"]),
            f"{seconds:.3f}",
            "-" if rate is None else f"{rate:.2f}",
            "-" if alone is None else f"{alone / seconds:.2f}",
            psnr,
        )
    return table


def quality_table(rows: list[dict[str, Any]], model: str, count: int) -> Table:
    table = _table(f"{model}, {count} pictures, beside one worker")
    for column in ("workers", "seconds", "skipped", "PSNR", "SSIM"):
        table.add_column(column, justify="right")
    for row in rows:
        psnr = "equal" if row["psnr"] is None else f"{row['psnr']:.1f} dB"
        figures = (f"{row['seconds']:.1f}", f"{row['skipped']:.0%}", psnr, f"{row['ssim']:.3f}")
        table.add_row(row["name"], str(row["workers"]), *figures)
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    return table
