"""Fills the blocks of the results pages from the benchmark runs in `docs/results/data`.

A block stands between `<!-- results: NAME -->` and `<!-- end -->`. NAME is a file of the data folder, whose `benchmark` key
selects the table, or a key of `COMPUTED`.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from docgen import beyond, compiled, diffusion, faults, headline, kernels, ladder, monitoring, planner, record, serving, training
from docgen.markdown import table
from docgen.record import Run

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "results" / "data"
BLOCK = re.compile(r"(<!-- results: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generic(run: Run) -> str:
    """A table written by hand: `columns` and `rows`."""
    return table(run["columns"], run["rows"])


TABLES: dict[str, Callable[[Run], str]] = {
    "serve": serving.serve,
    "startup": serving.startup,
    "routing": serving.routing,
    "transfer": serving.transfer,
    "tenants": serving.tenants,
    "vllm-plugin": serving.vllm_plugin,
    "quantized": beyond.quantized,
    "offload": beyond.offload,
    "speculative": beyond.speculative,
    "train": training.train,
    "finetune": training.finetune,
    "checkpoint": training.checkpoint,
    "memory-copies": training.memory_copies,
    "memory": training.memory,
    "kernels": kernels.kernels,
    "compile": compiled.compiled,
    "matmul": ladder.matmul,
    "matmul-stages": ladder.stages,
    "chaos": faults.chaos,
    "chaos-edges": faults.chaos_edges,
    "hostile": faults.hostile,
    "plan-validate": planner.plan_validate,
    "plan-queue": planner.plan_queue,
    "monitoring": monitoring.monitoring,
    "dit": diffusion.dit,
    "table": generic,
}
COMPUTED: dict[str, Callable[[], str]] = {
    "headline": lambda: headline.headline(load),
    "planner-regimes": planner.regimes,
    "plan-dit": diffusion.published,
}


@cache
def load(name: str) -> Run:
    run: Run = json.loads((DATA / f"{name}.json").read_text())
    return run


def block(run: Run) -> str:
    """Provenance, table, notes and command of a run."""
    parts = [record.heading(run), TABLES[run["benchmark"]](run), *record.notes(run), record.command(run)]
    return "\n\n".join(part for part in parts if part)


def fill(text: str) -> str:
    def filled(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}{COMPUTED[name]() if name in COMPUTED else block(load(name))}\n{end}"

    return ladder.fill(BLOCK.sub(filled, text))


def pages() -> dict[Path, str]:
    """Every page with a block, as it should be."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: path.read_text() for path in files}
    return {path: fill(text) for path, text in texts.items() if BLOCK.search(text)}


def pictures() -> dict[Path, str]:
    return ladder.pictures(load)


def names_used() -> set[str]:
    return {found[1] for path in pages() for found in BLOCK.findall(path.read_text())}
