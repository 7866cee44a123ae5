"""Selects the nodes of the workers before each start of them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import Excluded
from strata.training.elastic.capacity import Survey, survey

NODE_LABEL = "ray.io/node-id"
SETTLE_S = 20.0  # in which Ray has returned the resources of ended workers
LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Placement:
    """Label selector of a run's workers, None if they may run on any node. Called by Ray Train's controller."""

    run: Path
    worker: dict[str, float]  # Ray resources of one
    waits: bool  # for capacity: an autoscaler adds nodes, or an elastic run continues in another layout

    def __call__(self, count: int) -> dict[str, str] | None:
        if not excluded_nodes.read(self.run):
            return None
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = survey(self.worker, self.run)
            if found.free >= count or not found.excluded:
                return _without(found.excluded)
            if time.monotonic() >= deadline:
                return _without(indispensable(self.run, found, count, self.waits))
            time.sleep(LOOK_EVERY_S)


def indispensable(run: Path, found: Survey, count: int, waits: bool) -> dict[str, Excluded]:
    """Excluded nodes that are avoided although the other nodes lack capacity for `count` workers: those of corrupted replicas.
    Raises if the run cannot continue without them and does not wait."""
    strict = {node: one for node, one in found.excluded.items() if one.strict}
    free = found.free_without(strict)
    if strict and free < count and not waits:
        names = " ".join(one.sentence(run) for one in strict.values())
        raise UserError(
            f"The nodes that are not excluded have free resources for {free} of {count} workers. {names}",
            f"Add a node or permit fewer workers (parallel.workers={max(1, free)}..{count}), and resume with:"
            f" strata train --resume {run.name}",
        )
    return strict


def _without(avoided: Mapping[str, Excluded]) -> dict[str, str] | None:
    return {NODE_LABEL: f"!in({','.join(sorted(avoided))})"} if avoided else None
