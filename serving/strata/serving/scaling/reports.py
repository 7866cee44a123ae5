"""Reports of gateways for the autoscaler, in the directory.

Ray Serve collects figures of a deployment's own replicas only: a pool without replicas has none, and it is the gateways that know
of the requests that wait for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from strata.serving.scaling.demand import Seen
from strata.serving.transport.directory import Directory

logger = logging.getLogger("ray.serve")

ROLE = "demand"
REPORT_S = 1.0
STALE_S = 15.0  # a gateway that has not reported for so long is gone


async def publish_repeatedly(directory: Directory, name: str, counts: Callable[[], dict[str, int]]) -> None:
    """Publishes a gateway's counts: the fields of `Seen` but the time."""
    failing = False
    while True:
        try:
            await directory.publish(ROLE, name, counts() | {"at": time.time()})
            failing = False
        except Exception:  # the GCS is down: one line per outage
            if not failing:
                logger.exception("The demand cannot be reported to the autoscaler; retrying.")
            failing = True
        await asyncio.sleep(REPORT_S)


def total(reports: Iterable[dict[str, Any]], now: float) -> Seen | None:
    """Sum of the reports of the gateways that are alive; None if there is none."""
    alive = [report for report in reports if report["at"] > now - STALE_S]
    if not alive:
        return None
    names = ("arrivals", "ended", "prompt_tokens", "output_tokens", "in_flight", "waiting")
    return Seen(at=now, **{name: sum(int(report[name]) for report in alive) for name in names})
