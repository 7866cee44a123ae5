"""Excludes nodes on which ranks hang repeatedly or are slow, if the rest of the cluster has capacity for the run."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import HUNG, SLOW, Excluded
from strata.training.elastic.capacity import Survey
from strata.training.watchdog import hang_report
from strata.training.watchdog.evidence import Evidence

MOST_HANGS = 2  # on one node, with which it is excluded
MOST_REPLACED = 3  # nodes of slow ranks, in one run


class Suspects:
    """Decisions of the driver. `surveyed` returns a new survey, None if the cluster does not answer. `enough` is true for a
    number of workers on which the run can continue."""

    def __init__(self, run: Path, surveyed: Callable[[], Survey | None], enough: Callable[[int], bool]) -> None:
        self._run, self._surveyed, self._enough = run, surveyed, enough

    def hung(self, ranks: Sequence[Evidence], node: str) -> bool:
        """Excludes a node whose ranks caused the newest hang report, if they caused an earlier one too."""
        hangs = hang_report.caused_by(self._run, node)
        if len(hangs) < MOST_HANGS:
            return False
        return self._exclude(ranks, node, HUNG, f"{len(hangs)} hangs: {', '.join(hangs)}.", self._enough)

    def slow(self, ranks: Sequence[Evidence], node: str, sentence: str) -> bool:
        """Excludes the node of a slow rank, if other nodes have free resources for all of its workers."""
        if sum(one.kind == SLOW for one in excluded_nodes.read(self._run)) >= MOST_REPLACED:
            return False
        return self._exclude(ranks, node, SLOW, sentence, lambda workers: workers >= len(ranks))

    def _exclude(self, ranks: Sequence[Evidence], node: str, kind: str, cause: str, enough: Callable[[int], bool]) -> bool:
        survey = self._surveyed()
        if survey is None or node not in survey.nodes or not enough(elsewhere(survey, ranks, node)):
            return False
        try:
            excluded_nodes.add(self._run, Excluded(survey.nodes[node], kind, cause, time.time()))
        except OSError:  # the run's storage is full or gone: the next start may use the node
            return False
        return True


def elsewhere(survey: Survey, ranks: Sequence[Evidence], node: str) -> int:
    """Workers that can run on other nodes: those that do already, and those that fit on free resources."""
    return survey.free_without({node, *survey.excluded}) + sum(one.node != node for one in ranks)
