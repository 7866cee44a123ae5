"""Every query of every dashboard, for tests against a real Prometheus."""

import re
from dataclasses import dataclass

from strata.dashboards import boards, series
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

    def resolved(
        self,
        *,
        cluster: str = ".*",
        run: str = ".*",
        model: str = ".*",
        replica: str = ".*",
        rate_interval: str = "1m",
    ) -> str:
        """The query as Grafana sends it. Values of variables are regular expressions."""
        values = {"__rate_interval": rate_interval, "cluster": cluster, "run": run, "model": model, "replica": replica}
        return re.sub(r"\$(\w+)", lambda found: values[found[1]], self.expr)

    def reads(self) -> tuple[Readable, ...]:
        """Metrics and series that the query names."""
        return tuple(dict.fromkeys(KNOWN[word] for word in WORD.findall(self.expr) if word in KNOWN))

    def sources(self) -> frozenset[Source]:
        """Programs that the query needs besides Strata's: without an autoscaler, its series do not exist."""
        return frozenset(read.source for read in self.reads() if isinstance(read, series.Series))


def every() -> list[Query]:
    panels = [(board, panel) for board in boards.every() for panel in board.panels()]
    return [Query(board.uid, panel.title, line.expr) for board, panel in panels for line in panel.lines]
