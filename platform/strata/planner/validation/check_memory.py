"""Memory of model state against table 1 of the ZeRO paper (arXiv 1910.02054). See `published/README.md`."""

import csv
from dataclasses import dataclass
from pathlib import Path

from strata.planner.layout import Layout
from strata.planner.memory.activations import UNFUSED
from strata.planner.memory.state import write_state
from strata.planner.worksheet import Worksheet

TABLE = Path(__file__).parent / "published" / "zero_memory_2020.csv"
GB = 1e9


@dataclass(frozen=True)
class Row:
    """A published figure with the planner's. `printed` is the published text in GB: few digits, some truncated."""

    params_b: float
    dp: int
    zero: int
    printed: str
    predicted: float  # GB

    @property
    def published(self) -> float:
        return float(self.printed)

    @property
    def error(self) -> float:
        """Error from the nearest value that rounds to the printed figure: 0.12 covers 0.115 to 0.125."""
        half = 0.5 * 10.0 ** -len(self.printed.partition(".")[2])
        nearest = min(max(self.predicted, self.published - half), self.published + half)
        return self.predicted / nearest - 1


def zero_table() -> list[Row]:
    rows = []
    with TABLE.open(newline="") as file:
        for line in csv.DictReader(file):
            for zero in (1, 2, 3):
                parameters, dp = float(line["params_b"]), int(line["dp"])
                rows.append(Row(parameters, dp, zero, line[f"zero{zero}_gb"], _state(parameters * 1e9, dp, zero) / GB))
    return rows


def worst_error(rows: list[Row]) -> float:
    return max(abs(row.error) for row in rows)


def mean_error(rows: list[Row]) -> float:
    return sum(abs(row.error) for row in rows) / len(rows)


def _state(parameters: float, dp: int, zero: int) -> float:
    """Bytes of state, by the same worksheet lines as in a plan."""
    worksheet = Worksheet("state")
    worksheet.given("own", parameters)
    worksheet.given("own_experts", 0.0)
    write_state(worksheet, Layout(data=dp, zero=zero, batch=dp, precision="fp16"), UNFUSED)
    return worksheet["parameters"] + worksheet["gradients"] + worksheet["optimizer"]
