"""Lines of the console about excluded nodes."""

from strata.platform.errors import UserError
from strata.platform.ray_cluster import excluded_nodes
from strata.training.elastic.resizing import nodes
from strata.training.loop import Job


class ExclusionNews:
    """Names each excluded node once, and each start of the workers on one of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._named: set[str] = set()
        self._warned: set[tuple[str, float]] = set()

    def news(self) -> list[str]:
        try:
            excluded = excluded_nodes.read(self._job.run)
        except (OSError, UserError):  # raised at the next start of the workers
            return []
        self._named &= {one.node.id for one in excluded}  # one that was readmitted may be excluded again
        lines = [one.sentence(self._job.run) for one in excluded if one.node.id not in self._named]
        self._named |= {one.node.id for one in excluded}
        used = nodes(self._job)
        for one in excluded:
            if (
                one.node.id in used
                and (started := self._started_after(one.node.id))
                and (one.node.id, started) not in self._warned
            ):
                self._warned.add((one.node.id, started))
                lines.append(f"WARNING: the workers use the excluded node {one.node}: no other node has capacity.")
        return lines

    def _started_after(self, node: str) -> float | None:
        """Time of the workers' start, if it was after the node's exclusion."""
        try:
            started = self._job.nodes.stat().st_mtime
            return started if started > excluded_nodes.path(self._job.run, node).stat().st_mtime else None
        except FileNotFoundError:
            return None
