"""Preference losses DPO, hinge, IPO, KTO, ORPO and SimPO, from the log-probabilities of whole documents.

With r the log-probability of a document under the policy minus that under the reference model, l the mean log-probability of its
counted tokens under the policy, r/n the mean of r, and indices c for chosen and d for rejected (sigma is the logistic function):

| loss | formula | source |
|---|---|---|
| dpo | -(1 - e) log sigma(beta (r_c - r_d)) - e log sigma(-beta (r_c - r_d)), e: label_smoothing | Rafailov et al. 2023, eq. 7 |
| hinge | max(0, 1 - beta (r_c - r_d)) | Liu et al. 2023 (RSO), after SLiC |
| ipo | (r_c/n_c - r_d/n_d - 1 / (2 beta))^2 | Azar et al. 2023, eq. 17 |
| kto | desirable_weight (1 - sigma(beta (r - z))), undesirable_weight (1 - sigma(beta (z - r))) | Ethayarajh et al. 2024, eq. 8 |
| orpo | -l_c - beta log sigma(logit(exp l_c) - logit(exp l_d)) | Hong et al. 2024, eq. 6 and 7 |
| simpo | -log sigma(beta (l_c - l_d) - gamma) | Meng et al. 2024, eq. 6 |

With `sft_weight`, the loss of a pair also has that multiple of -l_c (Pang et al. 2024).

Differences between the papers and TRL 1.16:
- dpo: label smoothing is conservative DPO (Mitchell 2023), as in TRL before 0.29. TRL has had no smoothed DPO since; its `robust`
  loss is another estimator.
- ipo: the paper's formula has sums. TRL has means over tokens, which the authors confirmed to it, and so does this module.
- kto: the paper and TRL estimate z in a micro-batch, so it depends on the layout. Here it is an argument, estimated from the
  whole global batch (`kl.py`). The loss is the mean over the answers of the global batch, TRL's a mean of micro-batch means.
- orpo: TRL's first term covers the prompt too and is a mean over the tokens of a micro-batch. Here, as in the paper, it is the
  mean over the counted tokens of each document.
- sft_weight: TRL's `sft` loss is a mean over the tokens of a micro-batch. Here, as in the paper, it is a mean for each document.

All losses are independent of the division into micro-batches and ranks: the caller sums `values` and `sums` over them and divides
by the number of losses in the global batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.platform.recipe import PreferenceLoss, PreferenceSection

SUMS = ("losses", "loss", "accurate", "chosen", "chosen_reward", "chosen_nll", "rejected", "rejected_reward")


@dataclass(frozen=True)
class Documents:
    """Log-probabilities of the documents of a micro-batch; 2i and 2i + 1 are the chosen and the rejected answer to one prompt.

    `logp_n` and `reference_n` are sums over the `tokens_n` counted tokens of a document under the policy and under the reference
    model. A document needs a counted token: without one, its means and the loss are NaN. KTO needs no pairs, but `desirable_n`
    (booleans) and `kl`.
    """

    logp_n: Tensor
    tokens_n: Tensor
    reference_n: Tensor | None = None
    desirable_n: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True)
class Losses:
    """Loss of each pair, for KTO of each document, and the vector of metrics named in `SUMS`, which has no gradient.

    Both add up over micro-batches and ranks. `means` divides the total.
    """

    values: Tensor
    sums: Tensor


@dataclass(frozen=True)
class _Scores:
    """Losses with the rewards that they compare."""

    values: Tensor
    accurate: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    chosen_nll: Tensor


def preference_losses(section: PreferenceSection, documents: Documents) -> Losses:
    """Losses in fp32, or fp64 for fp64 input. No documents are valid input: a rank may have none."""
    _require_valid(section, documents)
    scores = _kto(section, documents) if section.loss == "kto" else _paired(section, documents)
    with torch.no_grad():
        counted = (
            _count(scores.values),
            scores.values.sum(),
            scores.accurate.sum(),
            _count(scores.chosen_rewards),
            scores.chosen_rewards.sum(),
            scores.chosen_nll.sum(),
            _count(scores.rejected_rewards),
            scores.rejected_rewards.sum(),
        )
        return Losses(scores.values, torch.stack([each.double() for each in counted]))


def means(sums: Tensor) -> dict[str, float]:
    """Metrics of a global batch from its summed `Losses.sums`. An absent kind of document has no metrics."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    found = {key: total[key] / total["losses"] for key in ("loss", "accurate") if total["losses"]}
    found |= {key: total[key] / total["chosen"] for key in ("chosen_reward", "chosen_nll") if total["chosen"]}
    found |= {key: total[key] / total["rejected"] for key in ("rejected_reward",) if total["rejected"]}
    if total["chosen"] and total["rejected"]:
        found["margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found


def loss_count(section: PreferenceSection, documents: int) -> int:
    """Number of losses of a batch with this many documents, by which the sum of its losses is divided."""
    return documents if section.loss == "kto" else documents // 2


def _paired(section: PreferenceSection, documents: Documents) -> _Scores:
    rewards_n = _rewards(section, documents)
    chosen, rejected = rewards_n[0::2], rewards_n[1::2]
    nll = -_mean_logp(documents)[0::2]
    values = _PAIRED[section.loss](section, chosen, rejected)
    # ORPO's own NLL has weight 1. Without a weight nothing is added, so that a document of NaN mean does not spoil other losses.
    weight = 1.0 if section.loss == "orpo" else section.sft_weight
    if weight:
        values = values + weight * nll
    return _Scores(values, chosen > rejected, chosen, rejected, nll)


def _rewards(section: PreferenceSection, documents: Documents) -> Tensor:
    """Rewards of the documents, of which a paired loss is a function. TRL logs sums over tokens as IPO's rewards too."""
    if section.loss in ("orpo", "simpo"):
        return section.scale * _mean_logp(documents)
    ratio_n = _ratio(documents)
    return section.scale * (ratio_n / documents.tokens_n if section.loss == "ipo" else ratio_n)


def _dpo(section: PreferenceSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    margin = chosen - rejected
    return -(1 - section.label_smoothing) * F.logsigmoid(margin) - section.label_smoothing * F.logsigmoid(-margin)


def _hinge(_: PreferenceSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    return F.relu(1 - (chosen - rejected))


def _ipo(section: PreferenceSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    return ((chosen - rejected - 0.5) / section.scale) ** 2  # rewards have the factor beta


def _orpo(section: PreferenceSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    return -section.scale * F.logsigmoid(_log_odds(chosen / section.scale) - _log_odds(rejected / section.scale))


def _simpo(section: PreferenceSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(chosen - rejected - section.gamma)


_PAIRED: dict[PreferenceLoss, Callable[[PreferenceSection, Tensor, Tensor], Tensor]] = {
    "dpo": _dpo,
    "hinge": _hinge,
    "ipo": _ipo,
    "orpo": _orpo,
    "simpo": _simpo,
}


def _kto(section: PreferenceSection, documents: Documents) -> _Scores:
    """KTO counts a document as accurate if its reward is on the right side of the reference point z."""
    assert documents.desirable_n is not None and documents.kl is not None
    desirable_n = documents.desirable_n
    rewards_n = section.scale * _ratio(documents)
    above_n = rewards_n - section.scale * documents.kl.detach()
    values_n = torch.where(
        desirable_n,
        section.desirable_weight * torch.sigmoid(-above_n),
        section.undesirable_weight * torch.sigmoid(above_n),
    )
    accurate_n = torch.where(desirable_n, above_n > 0, above_n < 0)
    nll = -_mean_logp(documents)[desirable_n]
    return _Scores(values_n, accurate_n, rewards_n[desirable_n], rewards_n[~desirable_n], nll)


def _ratio(documents: Documents) -> Tensor:
    assert documents.reference_n is not None
    return _at_least_fp32(documents.logp_n) - _at_least_fp32(documents.reference_n)


def _mean_logp(documents: Documents) -> Tensor:
    return _at_least_fp32(documents.logp_n) / documents.tokens_n


def _log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logp). The mean of a document that the model predicts with certainty may round to 0: it is
    taken as the next number below, so that odds and gradient stay finite."""
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _count(values: Tensor) -> Tensor:
    return values.new_tensor(values.numel(), dtype=torch.float64)


def _require_valid(section: PreferenceSection, documents: Documents) -> None:
    count = documents.logp_n.shape
    if len(count) != 1 or not documents.logp_n.is_floating_point():
        raise ValueError(f"logp_n must be a vector of floats, got {documents.logp_n.dtype} {list(count)}")
    if section.loss != "kto" and count[0] % 2:
        raise ValueError(f"loss={section.loss} needs pairs of a chosen and a rejected document, got {count[0]} documents")
    if documents.tokens_n.is_floating_point() or documents.tokens_n.dtype == torch.bool:
        raise ValueError(f"tokens_n must be integers, got {documents.tokens_n.dtype}")
    if (documents.reference_n is not None) != section.needs_reference:
        needs = (
            "needs the reference's log-probabilities" if section.needs_reference else "has no reference: pass reference_n=None"
        )
        raise ValueError(f"loss={section.loss} {needs}")
    if any((given is not None) != (section.loss == "kto") for given in (documents.desirable_n, documents.kl)):
        raise ValueError(f"desirable_n and kl are for loss=kto, which needs both; the loss is {section.loss}")
    if documents.desirable_n is not None and documents.desirable_n.dtype != torch.bool:
        raise ValueError(f"desirable_n must be booleans, got {documents.desirable_n.dtype}")
    if documents.kl is not None and documents.kl.numel() != 1:
        raise ValueError(f"kl must be one number of the whole global batch, got {list(documents.kl.shape)}")
    others = {"tokens_n": documents.tokens_n, "reference_n": documents.reference_n, "desirable_n": documents.desirable_n}
    for name, values in others.items():
        if values is not None and values.shape != count:
            raise ValueError(f"{name} must have one value for each of the {count[0]} documents, got {list(values.shape)}")
