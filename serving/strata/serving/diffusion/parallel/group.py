"""Process groups of a layout. A layout is one reshape of the ranks: (cfg, pipefusion, ring, ulysses)."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata.planner.diffusion.layout_rules import WARM_UP, PictureLayout, Splittable, check

ONE_WORKER = PictureLayout()


@dataclass(frozen=True)
class Axis:
    """Workers that differ from this one in one direction of the layout only."""

    ranks: tuple[int, ...] = (0,)
    index: int = 0  # of this worker
    group: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Group:
    """This worker's place in a layout. `control` carries decisions between the CPUs of all workers."""

    layout: PictureLayout = ONE_WORKER
    warm_up: int = WARM_UP
    cfg: Axis = Axis()
    stages: Axis = Axis()
    back: Axis = Axis()  # the stages again: last to first, apart from the messages in the other direction
    ring: Axis = Axis()
    ulysses: Axis = Axis()
    sequence: Axis = Axis()  # ring x ulysses
    everyone: Axis = Axis()
    control: Any = None

    @property
    def rank(self) -> int:
        return self.everyone.index

    def agree(self, decide: Callable[[], bool]) -> bool:
        """Worker 0's decision, on all workers. `decide` must not raise: the others wait for it."""
        if self.everyone.size == 1:
            return decide()
        flag = torch.tensor([self.rank == 0 and decide()], dtype=torch.uint8)
        dist.broadcast(flag, src=self.everyone.ranks[0], group=self.control)
        return bool(flag.item())


ALONE = Group()


def connect(layout: PictureLayout, warm_up: int = WARM_UP, timeout_s: float = 300.0) -> Group:
    """The groups of a layout over the processes of `torch.distributed`, which is initialized. All of them call this together; a
    multiple of the layout's workers is as many groups side by side. A wait for another worker that lasts `timeout_s` raises an
    error; the groups are then of no more use."""
    if layout.workers == 1:
        return ALONE
    world = dist.get_world_size()
    if world % layout.workers:
        raise ValueError(f"{layout.name()} is for {layout.workers} workers, of which {world} is no multiple")
    ranks = torch.arange(world).view(-1, layout.cfg, layout.pipefusion, layout.ring, layout.ulysses)
    groups = _Groups(timedelta(seconds=timeout_s))
    everyone = groups.axis(ranks.reshape(-1, layout.workers))
    return Group(
        layout,
        warm_up,
        cfg=groups.axis(ranks.movedim(1, -1).reshape(-1, layout.cfg)),
        stages=groups.axis(ranks.movedim(2, -1).reshape(-1, layout.pipefusion)),
        back=groups.axis(ranks.movedim(2, -1).reshape(-1, layout.pipefusion), of_its_own="back"),
        ring=groups.axis(ranks.movedim(3, -1).reshape(-1, layout.ring)),
        ulysses=groups.axis(ranks.reshape(-1, layout.ulysses)),
        sequence=groups.axis(ranks.reshape(-1, layout.sequence)),
        everyone=everyone,
        control=groups.axis(ranks.reshape(-1, layout.workers), of_its_own="control", backend="gloo").group,
    )


class _Groups:
    """Process groups by their ranks, so that axes with the same members share one."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self.made: dict[tuple[str, tuple[int, ...]], Any] = {}

    def axis(self, members: Tensor, of_its_own: str = "", backend: str | None = None) -> Axis:
        """Every process takes part in the creation of every group, in the same order."""
        mine = None
        for row in map(tuple, members.tolist()):
            if len(row) > 1 and (of_its_own, row) not in self.made:
                self.made[of_its_own, row] = dist.new_group(list(row), timeout=self.limit, backend=backend)
            if dist.get_rank() in row:
                mine = Axis(row, row.index(dist.get_rank()), self.made.get((of_its_own, row)))
        assert mine is not None
        return mine


def check_layout(layout: PictureLayout, heads: int, blocks: int, grid: tuple[int, int], two_passes: bool) -> None:
    """Raise a `UserError` if a layout does not work for a model and a picture. Patches of PipeFusion are whole rows of tokens."""
    rows, columns = grid
    tokens = rows if layout.pipefusion > 1 else rows * columns
    check(layout, Splittable(heads, blocks, tokens, two_passes))
