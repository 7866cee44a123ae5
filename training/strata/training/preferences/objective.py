"""Preference loss of a micro-batch, where the output layer computes it: in a whole model, or in a pipeline's last stage."""

from typing import Any

import torch
from torch import Tensor

from strata.platform.recipe import PreferenceSection
from strata.training.preferences.logprobs import document_logprobs, summed_over
from strata.training.preferences.losses import SUMS, Documents, preference_losses


class PreferenceObjective:
    """Loss over answers or, while `collecting`, their log-probabilities alone.

    `sums` adds up the metrics of training steps on ranks with an output layer; elsewhere it stays zero. Each rank of a tensor- or
    sequence-parallel group adds the same, which the metrics' ratios do not see. `group` are the ranks with slices of the same
    rows. `kl` is KTO's reference point in the current step or evaluation.
    """

    def __init__(self, section: PreferenceSection, group: Any) -> None:
        self._section, self._group = section, group
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self.collecting = False
        self.collected: list[Tensor] = []
        self.kl: Tensor | None = None

    def loss(
        self,
        x_btd: Tensor,
        weight_vd: Tensor,
        targets_bt: Tensor,
        count: float | Tensor,
        softcap: float | None,
        *answers: Tensor,
    ) -> Tensor:
        """Sum of the losses of pairs, for KTO of answers, over `count`. `answers` are the tensors of `batch.Answers`."""
        document_bt, reference_n, desirable_n = answers
        x_nd, targets_n, document_n = x_btd.flatten(0, 1), targets_bt.flatten(), document_bt.flatten()
        logp_n, tokens_n = document_logprobs(x_nd, weight_vd, targets_n, document_n, len(reference_n), softcap)
        if self._group is not None:
            logp_n, tokens_n = summed_over(logp_n, self._group), summed_over(tokens_n, self._group)
        if self.collecting:
            self.collected.append(logp_n.detach())
            return logp_n.sum() * 0
        reference = reference_n if self._section.needs_reference else None
        labels = desirable_n if self._section.loss == "kto" else None
        losses = preference_losses(self._section, Documents(logp_n, tokens_n, reference, labels, self.kl))
        if torch.is_grad_enabled():
            self.sums += losses.sums.cpu()
        return losses.values.sum() / count

    def take_sums(self) -> Tensor:
        """Metrics since the last call."""
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken
