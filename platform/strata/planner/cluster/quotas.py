"""Quotas of teams that share a cluster, as in a Kueue cohort: nominal quotas, borrowing and its limit."""

from collections.abc import Sequence

from strata.planner.cluster.jobs import Team


class Cohort:
    """GPUs that each team uses. What a team uses beyond its quota is borrowed from quotas that others leave unused, so all
    teams together never use more than the sum of quotas."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self.teams = {team.name: team for team in teams}
        self.capacity = sum(team.quota for team in teams)
        self.used = dict.fromkeys(self.teams, 0)
        self.total = 0

    def admits(self, team: str, gpus: int) -> bool:
        return self.used[team] + gpus <= self.teams[team].most and self.total + gpus <= self.capacity

    def within(self, team: str, gpus: int) -> bool:
        """True if a job of this size would leave the team within its own quota."""
        return self.used[team] + gpus <= self.teams[team].quota

    def share(self, team: str, gpus: int) -> float:
        """Use relative to the quota, with a job of this size."""
        return (self.used[team] + gpus) / self.teams[team].quota

    def borrows(self, team: str) -> bool:
        return self.used[team] > self.teams[team].quota

    def take(self, team: str, gpus: int) -> None:
        self.used[team] += gpus
        self.total += gpus

    def give_back(self, team: str, gpus: int) -> None:
        self.take(team, -gpus)

    def can_ever(self, team: str, gpus: int) -> bool:
        return gpus <= min(self.teams[team].most, self.capacity)
