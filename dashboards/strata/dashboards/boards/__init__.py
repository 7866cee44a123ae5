"""The boards, one file each; each file ends in its `BOARD`."""

from strata.dashboards.board import Board
from strata.dashboards.boards import cluster, oncall, serving, teams, training


def every() -> tuple[Board, ...]:
    return (oncall.BOARD, cluster.BOARD, training.BOARD, serving.BOARD, teams.BOARD)
