"""Scheduling policies of a queue of gangs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """`backfill`: jobs may overtake a job that waits if they do not delay its reserved start (EASY). `compact`: few blocks per
    gang. `preempts`: by priority. `shares`: quotas of teams, with borrowing and reclaim."""

    name: str
    about: str
    backfill: bool = True
    compact: bool = False
    preempts: bool = False
    shares: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fifo", "in order of submission; a job that does not fit stops all behind it", backfill=False),
        Policy("easy", "FIFO with EASY backfill: later jobs fill gaps that do not delay the first job that waits"),
        Policy("topology", "easy, and a gang spans as few blocks as possible", compact=True),
        Policy("priority", "easy by priority and age; a higher priority preempts a lower one", compact=True, preempts=True),
        Policy("fair", "a queue per team with a quota; borrowing, and reclaim by preemption", compact=True, shares=True),
    )
}


@dataclass(frozen=True)
class Rules:
    """Figures that all policies share. A preempted job writes a checkpoint while it holds its GPUs (`save_s`), and spends
    `restart_s` without progress when it starts again."""

    save_s: float = 30.0
    restart_s: float = 60.0  # processes and communicators, as in the failure model
    # A priority counts as much as this time in the queue, so a job is overtaken only by jobs that are submitted within this
    # time per level.
    ageing_s: float = 12 * 3600.0
    depth: int = 500  # waiting jobs that backfill looks at per event, as Slurm limits them
