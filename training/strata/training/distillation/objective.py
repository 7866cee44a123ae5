"""Distillation loss of a micro-batch, where the output layer computes it: in a whole model, or in a pipeline's last stage."""

import torch
from torch import Tensor

from strata.training.distillation.losses import Comparison, Output, compare, distillation_loss
from strata.training.distillation.teacher import Teacher


class DistillationObjective:
    """Cross entropy with the teacher's distribution in training, and with the text in evaluation, as in every other run.

    `part` is this rank's index among ranks with slices of the same rows. `sums` adds up the comparison with the teacher in an
    evaluation. Each rank of a tensor-parallel group adds the same, which ratios do not see.
    """

    def __init__(self, part: int) -> None:
        self._part = part
        self._sums = torch.zeros(len(Comparison._fields), dtype=torch.float64)
        self.teacher: Teacher | None = None  # on a rank with an output layer

    # A compiled output layer would otherwise compile the whole teacher.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def loss(
        self,
        x_btd: Tensor,
        weight_vd: Tensor,
        targets_bt: Tensor,
        count: float | Tensor,
        softcap: float | None,
        *rows: Tensor,
    ) -> Tensor:
        """Sum of the losses of counted tokens over `count`. `rows` are whole rows of tokens and, of packed documents, their
        positions."""
        assert self.teacher
        tokens_bt, positions_bt = rows if len(rows) == 2 else (rows[0], None)
        width = x_btd.shape[1]
        taught = self.teacher.output(tokens_bt, positions_bt, slice(self._part * width, (self._part + 1) * width))
        student, targets_n = Output(x_btd.flatten(0, 1), weight_vd, softcap), targets_bt.flatten()
        if torch.is_grad_enabled():
            return distillation_loss(student, taught, targets_n) / count
        found = compare(student, taught, targets_n)
        self._sums += torch.stack(found).cpu()
        return found.cross_entropy.float() / count

    def take_sums(self) -> Tensor:
        """Sums of a `Comparison` since the last call."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken


def means(sums: Tensor) -> dict[str, float]:
    """Metrics of an evaluation, from sums over all ranks."""
    total = Comparison(*sums.tolist())
    return {"kl": float(total.kl / total.tokens), "agreement": float(total.agreeing / total.tokens)}
