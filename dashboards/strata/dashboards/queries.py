"""Every query of every dashboard, for tests against a real Prometheus."""

import re
from dataclasses import dataclass

from strata.dashboards import boards, series
from strata.dashboards.board import Board
from strata.dashboards.series import Readable, Source
from strata.platform import metrics

WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
NAMED: tuple[Readable, ...] = (*metrics.EVERY, *series.EVERY)
KNOWN = {readable.exported: readable for readable in NAMED}
KNOWN |= {f"{metric.exported}_bucket": metric for metric in metrics.EVERY if metric.kind == "histogram"}


@dataclass(frozen=True)
class Query:
    board: str
    panel: str
    expr: str
    instant: bool = False  # one value per series, not their course over the time range

    def resolved(
        self,
        *,
        cluster: str = ".*",
        ray_cluster: str = ".*",
        team: str = ".*",
        node: str = ".*",
        run: str = ".*",
        model: str = ".*",
        replica: str = ".*",
        rate_interval: str = "1m",
        time_range: str = "1h",
    ) -> str:
        """The query as Grafana sends it. Values of variables are regular expressions."""
        values = {
            "__rate_interval": rate_interval,
            "__range": time_range,
            "cluster": cluster,
            "ray_cluster": ray_cluster,
            "team": team,
            "node": node,
            "run": run,
            "model": model,
            "replica": replica,
        }
        return re.sub(r"\$(\w+)", lambda found: values[found[1]], self.expr)

    def reads(self) -> tuple[Readable, ...]:
        """Metrics and series that the query names."""
        return tuple(dict.fromkeys(KNOWN[word] for word in WORD.findall(self.expr) if word in KNOWN))

    def sources(self) -> frozenset[Source]:
        """Programs that the query needs besides Strata's: without an autoscaler, its series do not exist."""
        return frozenset(read.source for read in self.reads() if isinstance(read, series.Series))


def every() -> list[Query]:
    return [query for board in boards.every() for query in of(board)]


def of(board: Board) -> list[Query]:
    """Queries of the panels, and of the annotations, which Grafana sends once for the whole dashboard."""
    panels = [Query(board.uid, panel.title, line.expr, panel.is_instant()) for panel in board.panels() for line in panel.lines]
    return panels + [Query(board.uid, f"annotation {mark.name}", mark.expr) for mark in board.annotations]
