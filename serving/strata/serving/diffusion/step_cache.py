"""First-block step cache: a step whose first block changes little reuses what the other blocks added in an earlier step.

The change of the first block's residual is measured per picture, over all of its tokens and both passes of guidance, so that a
picture does not depend on its batch or on the layout. Partial sums are gathered and added in rank order: all workers take the
same decision. diffusers' own caches decide by each worker's share, and exist for FLUX alone of the families here."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.serving.diffusion.families import Family, Modulation, Tokens
from strata.serving.diffusion.parallel.group import Axis


class StepCache:
    """State of one sampling call at a time. `threshold` is the relative change of the first block's residual below which the
    other blocks are skipped; 0 skips nothing."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.computed = self.skipped = 0  # evaluations of the blocks after the first, per picture and step

    def begin(self, pictures: int, everyone: Axis) -> None:
        self.pictures, self.everyone = pictures, everyone
        self.computed = self.skipped = 0
        self.first: Tensor | None = None  # residual of the first block in the last computed step, [rows, tokens, width]
        self.rest: Tensor | None = None  # residual of the other blocks in that step

    def run(self, family: Family, blocks: list[nn.Module], tokens: Tokens, modulation: Modulation) -> Tokens:
        after_first = family.block(blocks[0], tokens, modulation)
        residual = after_first.image - tokens.image
        compute = self._decide(residual)
        count = sum(compute)
        self.computed += count
        self.skipped += self.pictures - count
        rows = torch.tensor(compute, device=residual.device).repeat(len(residual) // self.pictures).nonzero().flatten()
        if self.first is None or self.rest is None:
            self.first, self.rest = torch.empty_like(residual), torch.empty_like(residual)
        if count:
            part, inputs = (after_first, modulation) if all(compute) else (after_first.rows(rows), modulation.rows(rows))
            start = part.image
            for block in blocks[1:]:
                part = family.block(block, part, inputs)
            self.first[rows], self.rest[rows] = residual[rows], part.image - start
            if all(compute):
                return part
        image = after_first.image + self.rest
        if count:
            image[rows] = part.image
        return Tokens(image)

    def _decide(self, residual: Tensor) -> list[bool]:
        """Pictures whose blocks run in this step."""
        if self.first is None:
            return [True] * self.pictures
        change = (residual - self.first).float().abs().flatten(1).sum(1)
        size = self.first.float().abs().flatten(1).sum(1)
        sums = torch.unflatten(torch.stack((change, size)), 1, (-1, self.pictures)).sum(1)  # [2, pictures]
        if self.everyone.size > 1:
            parts = [torch.empty_like(sums) for _ in self.everyone.ranks]
            dist.all_gather(parts, sums, group=self.everyone.group)
            sums = torch.stack(parts).sum(0)
        change, size = sums
        return [not c < self.threshold * s for c, s in zip(change.tolist(), size.tolist(), strict=True)]
