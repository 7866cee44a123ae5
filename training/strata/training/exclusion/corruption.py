"""Excludes the node of a corrupted replica."""

import sys
import time
from pathlib import Path

from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import CORRUPTED, GRADIENTS, Excluded
from strata.platform.recipe import ParallelSection
from strata.training.watchdog.replicas import ReplicaDiffers


def exclude(run: Path, parallel: ParallelSection, error: ReplicaDiffers) -> None:
    """Called by all ranks before the error is raised: Ray may restart the workers as soon as one of them has failed. On a cluster
    with one node nothing is excluded."""
    if not error.nodes:
        return
    from strata.training.elastic.capacity import resources, survey

    try:
        able = survey(resources(parallel), run).nodes
        kind = CORRUPTED if error.parameters else GRADIENTS
        for node in error.nodes & able.keys() if len(able) > 1 else ():
            excluded_nodes.add(run, Excluded(able[node], kind, str(error), time.time()))
    except Exception as failure:  # Ray raises many types; the corruption is what has to be reported
        print(f"The node of the corrupted replica cannot be excluded: {type(failure).__name__}: {failure}", file=sys.stderr)
