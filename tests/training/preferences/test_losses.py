"""Preference losses against formulas of the papers in plain Python, their gradients, invariances, and sums over parts."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from strata.platform.recipe import PreferenceLoss, PreferenceSection
from strata.training.preferences.losses import SUMS, Documents, Losses, loss_count, means, preference_losses

PAIRS = 6
KL = 0.3


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def section(loss: PreferenceLoss, **keys: Any) -> PreferenceSection:
    return PreferenceSection(loss=loss, **keys)


def documents(loss: PreferenceLoss, pairs: int = PAIRS, seed: int = 0, dtype: torch.dtype = torch.float64) -> Documents:
    """Random documents: some pairs are ranked right and some wrong, lengths differ, and the labels of KTO are not in pairs."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 9, (2 * pairs,), generator=generator)
    logp, reference = (-tokens * torch.rand(2 * pairs, generator=generator, dtype=dtype) for _ in range(2))
    if loss == "kto":
        desirable = torch.rand(2 * pairs, generator=generator) < 0.6
        return Documents(logp, tokens, reference, desirable, torch.tensor(KL, dtype=dtype))
    return Documents(logp, tokens, reference if section(loss).needs_reference else None)


def part(whole: Documents, start: int, stop: int) -> Documents:
    cut = slice(start, stop)
    reference = None if whole.reference_n is None else whole.reference_n[cut]
    desirable = None if whole.desirable_n is None else whole.desirable_n[cut]
    return Documents(whole.logp_n[cut], whole.tokens_n[cut], reference, desirable, whole.kl)


# References: the losses of one pair, or of one document for KTO.

Row = tuple[float, float, int]  # log-probability, the reference's, tokens


def dpo(s: PreferenceSection, chosen: Row, rejected: Row) -> float:
    """Eq. 7 of Rafailov et al. The target distribution of conservative DPO is 1 - e for the chosen answer, e for the other."""
    h = s.scale * ((chosen[0] - rejected[0]) - (chosen[1] - rejected[1]))
    e = s.label_smoothing
    return -(1 - e) * math.log(sigmoid(h)) - e * math.log(1 - sigmoid(h))


def hinge(s: PreferenceSection, chosen: Row, rejected: Row) -> float:
    return max(0.0, 1 - s.scale * ((chosen[0] - chosen[1]) - (rejected[0] - rejected[1])))


def ipo(s: PreferenceSection, chosen: Row, rejected: Row) -> float:
    h = (chosen[0] - chosen[1]) / chosen[2] - (rejected[0] - rejected[1]) / rejected[2]
    return (h - 1 / (2 * s.scale)) ** 2


def orpo(s: PreferenceSection, chosen: Row, rejected: Row) -> float:
    """Eq. 6 and 7 of Hong et al.: the likelihood of an answer is the geometric mean of its tokens' probabilities."""
    p, q = (math.exp(row[0] / row[2]) for row in (chosen, rejected))
    odds_ratio = (p / (1 - p)) / (q / (1 - q))
    return -math.log(p) - s.scale * math.log(sigmoid(math.log(odds_ratio)))


def simpo(s: PreferenceSection, chosen: Row, rejected: Row) -> float:
    return -math.log(sigmoid(s.scale * chosen[0] / chosen[2] - s.scale * rejected[0] / rejected[2] - s.gamma))


def kto(s: PreferenceSection, row: Row, desirable: bool) -> float:
    """Eq. 8 of Ethayarajh et al.: the loss is the weight minus the value."""
    ratio = row[0] - row[1]
    if desirable:
        return s.desirable_weight - s.desirable_weight * sigmoid(s.scale * (ratio - KL))
    return s.undesirable_weight - s.undesirable_weight * sigmoid(s.scale * (KL - ratio))


PLAIN: dict[str, Callable[[PreferenceSection, Row, Row], float]] = {
    "dpo": dpo,
    "hinge": hinge,
    "ipo": ipo,
    "orpo": orpo,
    "simpo": simpo,
}


def plain(s: PreferenceSection, given: Documents) -> list[float]:
    reference = torch.zeros_like(given.logp_n) if given.reference_n is None else given.reference_n
    rows = list(zip(given.logp_n.tolist(), reference.tolist(), given.tokens_n.tolist(), strict=True))
    if s.loss == "kto":
        assert given.desirable_n is not None
        return [kto(s, row, good) for row, good in zip(rows, given.desirable_n.tolist(), strict=True)]
    pairs = list(zip(rows[0::2], rows[1::2], strict=True))
    return [PLAIN[s.loss](s, chosen, rejected) - s.sft_weight * chosen[0] / chosen[2] for chosen, rejected in pairs]


SECTIONS = [
    section("dpo"),
    section("dpo", beta=0.7, label_smoothing=0.2),
    section("dpo", beta=2.5, sft_weight=0.4),
    section("hinge", beta=0.9),
    section("hinge", beta=0.2, sft_weight=2),
    section("ipo"),
    section("ipo", beta=0.6, sft_weight=0.5),
    section("kto"),
    section("kto", beta=1.7, desirable_weight=1.33, undesirable_weight=0.8),
    section("orpo"),
    section("orpo", beta=1.4),
    section("simpo"),
    section("simpo", beta=2.5, gamma=0.3, sft_weight=0.1),
]
each_section = pytest.mark.parametrize("s", SECTIONS, ids=lambda s: f"{s.loss}-{s.beta}")
each_loss = pytest.mark.parametrize("loss", get_args(PreferenceLoss))


@each_section
def test_losses_are_those_of_the_papers(s: PreferenceSection) -> None:
    given = documents(s.loss)
    found = preference_losses(s, given)
    assert found.values.tolist() == pytest.approx(plain(s, given), rel=1e-12)
    assert len(found.values) == loss_count(s, 2 * PAIRS) == (2 * PAIRS if s.loss == "kto" else PAIRS)


@each_section
def test_single_precision_is_accurate(s: PreferenceSection) -> None:
    given = documents(s.loss, dtype=torch.float32)
    found = preference_losses(s, given).values
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(plain(s, given), rel=2e-6, abs=2e-7)


@each_section
def test_gradients(s: PreferenceSection) -> None:
    given = documents(s.loss)

    def values(logp_n: Tensor) -> Tensor:
        others = (given.tokens_n, given.reference_n, given.desirable_n, given.kl)
        return preference_losses(s, Documents(logp_n, *others)).values

    assert torch.autograd.gradcheck(values, given.logp_n.requires_grad_())


@each_loss
def test_gradients_favour_the_chosen_answer(loss: PreferenceLoss) -> None:
    given = documents(loss)
    given.logp_n.requires_grad_()
    preference_losses(section(loss), given).values.sum().backward()
    assert given.logp_n.grad is not None
    chosen = given.desirable_n if given.desirable_n is not None else torch.arange(2 * PAIRS) % 2 == 0
    assert (given.logp_n.grad[chosen] < 0).all() and (given.logp_n.grad[~chosen] > 0).all()


def test_reference_point_has_no_gradient() -> None:
    given = documents("kto")
    assert given.kl is not None
    given.kl.requires_grad_()
    given.logp_n.requires_grad_()
    preference_losses(section("kto"), given).values.sum().backward()
    assert given.kl.grad is None and given.logp_n.grad is not None


# Invariances


def swapped(given: Documents) -> Documents:
    order = torch.arange(len(given.logp_n)).view(-1, 2).flip(1).flatten()
    reference = None if given.reference_n is None else given.reference_n[order]
    return Documents(given.logp_n[order], given.tokens_n[order], reference)


def test_swapping_a_pair_negates_the_margin() -> None:
    """For DPO the losses of a pair and of the swapped pair differ by the margin; smoothing by one half makes them equal."""
    given = documents("dpo")
    s = section("dpo", beta=0.8)
    one, other = (preference_losses(s, each) for each in (given, swapped(given)))
    margins = (one.values - other.values).tolist()
    assert given.reference_n is not None
    ratio = 0.8 * (given.logp_n - given.reference_n)
    assert margins == pytest.approx((ratio[1::2] - ratio[0::2]).tolist())
    assert means(one.sums)["margin"] == pytest.approx(-means(other.sums)["margin"])
    assert means(one.sums)["accurate"] == pytest.approx(1 - means(other.sums)["accurate"])


def test_smoothing_is_a_mixture_of_a_pair_and_the_swapped_pair() -> None:
    given = documents("dpo")
    smooth = preference_losses(section("dpo", beta=0.8, label_smoothing=0.3), given).values
    one, other = (preference_losses(section("dpo", beta=0.8), each).values for each in (given, swapped(given)))
    assert smooth.tolist() == pytest.approx((0.7 * one + 0.3 * other).tolist())


def test_equal_policies() -> None:
    given = documents("dpo")
    same = Documents(given.logp_n, given.tokens_n, given.logp_n.clone())
    assert preference_losses(section("dpo"), same).values.tolist() == pytest.approx([math.log(2)] * PAIRS)
    assert preference_losses(section("dpo", label_smoothing=0.3), same).values.tolist() == pytest.approx([math.log(2)] * PAIRS)
    assert preference_losses(section("hinge"), same).values.tolist() == pytest.approx([1.0] * PAIRS)
    assert preference_losses(section("ipo", beta=0.25), same).values.tolist() == pytest.approx([4.0] * PAIRS)
    kl = torch.tensor(0.0, dtype=torch.float64)
    desirable = torch.arange(2 * PAIRS) % 2 == 0
    unpaired = Documents(given.logp_n, given.tokens_n, given.logp_n.clone(), desirable, kl)
    assert preference_losses(section("kto"), unpaired).values.tolist() == pytest.approx([0.5] * 2 * PAIRS)


def test_vanishing_beta() -> None:
    tiny = 1e-12
    given = documents("dpo")
    assert preference_losses(section("dpo", beta=tiny), given).values.tolist() == pytest.approx([math.log(2)] * PAIRS)
    assert preference_losses(section("hinge", beta=tiny), given).values.tolist() == pytest.approx([1.0] * PAIRS)
    assert preference_losses(section("kto", beta=tiny), documents("kto")).values.tolist() == pytest.approx([0.5] * 2 * PAIRS)
    free = documents("simpo")
    found = preference_losses(section("simpo", beta=tiny, gamma=0.7), free).values
    assert found.tolist() == pytest.approx([-math.log(sigmoid(-0.7))] * PAIRS)
    nll = -(free.logp_n / free.tokens_n)[0::2]
    assert preference_losses(section("orpo", beta=tiny), free).values.tolist() == pytest.approx(nll.tolist())


def test_constants_added_to_both_references_cancel() -> None:
    given = documents("dpo")
    assert given.reference_n is not None
    shifted = Documents(given.logp_n, given.tokens_n, given.reference_n + 5)
    for loss in ("dpo", "hinge"):
        one, other = (preference_losses(section(loss), each).values for each in (given, shifted))
        assert one.tolist() == pytest.approx(other.tolist())


def test_losses_by_mean_do_not_depend_on_length() -> None:
    """Documents with every token twice have the same losses."""
    for loss in ("ipo", "orpo", "simpo"):
        given = documents(loss)
        reference = None if given.reference_n is None else 2 * given.reference_n
        twice = Documents(2 * given.logp_n, 2 * given.tokens_n, reference)
        one, other = (preference_losses(section(loss, beta=0.5), each).values for each in (given, twice))
        assert one.tolist() == pytest.approx(other.tolist())


# Extremes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("chosen", "rejected"), [(0.0, 0.0), (0.0, -5.0), (-5.0, 0.0), (-1e-9, -1e-9), (-1e4, -1.0), (-1.0, -1e4)]
)
@each_loss
def test_certain_and_impossible_answers_are_finite(
    loss: PreferenceLoss, chosen: float, rejected: float, dtype: torch.dtype
) -> None:
    logp = torch.tensor([chosen, rejected], dtype=dtype, requires_grad=True)
    tokens = torch.tensor([2, 2])
    reference = torch.tensor([-3.0, -3.0], dtype=dtype) if section(loss).needs_reference else None
    extra = (torch.tensor([True, False]), torch.tensor(0.0, dtype=dtype)) if loss == "kto" else (None, None)
    found = preference_losses(section(loss), Documents(logp, tokens, reference, *extra))
    found.values.sum().backward()
    assert found.values.isfinite().all() and logp.grad is not None and logp.grad.isfinite().all()
    assert found.sums.isfinite().all()


@each_loss
def test_no_documents(loss: PreferenceLoss) -> None:
    given = part(documents(loss), 0, 0)
    given.logp_n.requires_grad_()
    found = preference_losses(section(loss), given)
    assert found.values.shape == (0,) and found.sums.tolist() == [0.0] * len(SUMS)
    found.values.sum().backward()
    assert given.logp_n.grad is not None and means(found.sums) == {}


# Metrics and sums


def test_metrics_of_pairs() -> None:
    logp = torch.tensor([-1.0, -4.0, -6.0, -2.0, -3.0, -3.0])
    reference = torch.tensor([-2.0, -3.0, -4.0, -4.0, -3.0, -3.0])
    tokens = torch.tensor([2, 1, 3, 4, 5, 6])
    found = preference_losses(section("dpo", beta=0.5), Documents(logp, tokens, reference))
    assert dict(zip(SUMS, found.sums.tolist(), strict=True)) == pytest.approx(
        {
            "losses": 3,
            "loss": found.values.sum().item(),
            "accurate": 1,  # the second pair is ranked wrong, and a tie is not right
            "chosen": 3,
            "chosen_reward": 0.5 * (1 - 2 + 0),
            "chosen_nll": 1 / 2 + 6 / 3 + 3 / 5,
            "rejected": 3,
            "rejected_reward": 0.5 * (-1 + 2 + 0),
        }
    )
    assert means(found.sums) == pytest.approx(
        {
            "loss": found.values.mean().item(),
            "accurate": 1 / 3,
            "chosen_reward": -0.5 / 3,
            "chosen_nll": 3.1 / 3,
            "rejected_reward": 0.5 / 3,
            "margin": -1 / 3,
        }
    )


@pytest.mark.parametrize(
    ("loss", "chosen", "rejected"), [("ipo", 0.5 * 1 / 2, -0.5), ("orpo", 0.5 * -1 / 2, -2.0), ("simpo", 0.5 * -1 / 2, -2.0)]
)
def test_rewards_are_those_that_the_loss_compares(loss: PreferenceLoss, chosen: float, rejected: float) -> None:
    reference = torch.tensor([-2.0, -3.0]) if section(loss).needs_reference else None
    found = preference_losses(section(loss, beta=0.5), Documents(torch.tensor([-1.0, -4.0]), torch.tensor([2, 1]), reference))
    metrics = means(found.sums)
    assert (metrics["chosen_reward"], metrics["rejected_reward"]) == pytest.approx((chosen, rejected))


def test_metrics_of_documents_without_pairs() -> None:
    logp, reference = torch.tensor([-1.0, -1.0, -5.0]), torch.tensor([-2.0, -1.5, -3.0])
    desirable, kl = torch.tensor([True, True, False]), torch.tensor(0.75)
    found = preference_losses(section("kto", beta=2), Documents(logp, torch.tensor([1, 2, 4]), reference, desirable, kl))
    assert means(found.sums) == pytest.approx(
        {
            "loss": found.values.mean().item(),
            "accurate": 2 / 3,  # the second ratio, 0.5, is below the reference point
            "chosen_reward": 2 * (1 + 0.5) / 2,
            "chosen_nll": (1 / 1 + 1 / 2) / 2,
            "rejected_reward": -4,
            "margin": 1.5 + 4,
        }
    )
    only = preference_losses(section("kto"), Documents(logp[:2], torch.tensor([1, 2]), reference[:2], desirable[:2], kl))
    assert means(only.sums).keys() == {"loss", "accurate", "chosen_reward", "chosen_nll"}
    other = preference_losses(section("kto"), Documents(logp[2:], torch.tensor([4]), reference[2:], desirable[2:], kl))
    assert means(other.sums).keys() == {"loss", "accurate", "rejected_reward"}


def test_metrics_have_no_gradient() -> None:
    given = documents("dpo")
    given.logp_n.requires_grad_()
    found = preference_losses(section("dpo"), given)
    assert found.values.requires_grad and not found.sums.requires_grad


def total(found: list[Losses]) -> tuple[float, list[float]]:
    return sum(each.values.sum().item() for each in found), sum(each.sums for each in found).tolist()  # type: ignore[union-attr]


@each_section
def test_parts_of_any_size_add_up_to_the_whole_batch(s: PreferenceSection) -> None:
    whole = documents(s.loss)
    value, sums = total([preference_losses(s, whole)])
    for ends in ([2, 4, 6, 8, 10], [8], [2, 2, 10]):
        bounds = [0, *ends, 2 * PAIRS]
        found = [preference_losses(s, part(whole, a, b)) for a, b in pairwise(bounds)]
        parts_value, parts_sums = total(found)
        assert parts_value == pytest.approx(value, rel=1e-12) and parts_sums == pytest.approx(sums, rel=1e-12)


# Wrong input

FOUR = torch.tensor([-1.0, -2.0, -3.0, -4.0])
COUNTS = torch.tensor([1, 2, 3, 4])
LABELS = torch.tensor([True, False, True, False])
ZERO = torch.tensor(0.0)


@pytest.mark.parametrize(
    ("loss", "given", "message"),
    [
        ("dpo", Documents(FOUR[:3], COUNTS[:3], FOUR[:3]), "needs pairs .* got 3 documents"),
        ("dpo", Documents(FOUR, COUNTS), "loss=dpo needs the reference's"),
        ("kto", Documents(FOUR, COUNTS, None, LABELS, ZERO), "loss=kto needs the reference's"),
        ("simpo", Documents(FOUR, COUNTS, FOUR), "loss=simpo has no reference"),
        ("orpo", Documents(FOUR, COUNTS, FOUR), "loss=orpo has no reference"),
        ("dpo", Documents(FOUR.view(2, 2), COUNTS, FOUR), r"vector of floats, got torch.float32 \[2, 2\]"),
        ("dpo", Documents(COUNTS, COUNTS, FOUR), "vector of floats, got torch.int64"),
        ("dpo", Documents(FOUR, COUNTS.float(), FOUR), "tokens_n must be integers"),
        ("dpo", Documents(FOUR, COUNTS > 1, FOUR), "tokens_n must be integers"),
        ("dpo", Documents(FOUR, COUNTS[:2], FOUR), r"tokens_n must have one value for each of the 4 documents, got \[2\]"),
        ("dpo", Documents(FOUR, COUNTS, FOUR[:1]), "reference_n must have one value"),
        ("dpo", Documents(FOUR, COUNTS, FOUR, LABELS), "are for loss=kto"),
        ("dpo", Documents(FOUR, COUNTS, FOUR, None, ZERO), "are for loss=kto"),
        ("kto", Documents(FOUR, COUNTS, FOUR, LABELS), "needs both"),
        ("kto", Documents(FOUR, COUNTS, FOUR, None, ZERO), "needs both"),
        ("kto", Documents(FOUR, COUNTS, FOUR, COUNTS, ZERO), "desirable_n must be booleans"),
        ("kto", Documents(FOUR, COUNTS, FOUR, LABELS[:3], ZERO), "desirable_n must have one value"),
        ("kto", Documents(FOUR, COUNTS, FOUR, LABELS, FOUR), r"kl must be one number .* got \[4\]"),
    ],
)
def test_wrong_input_is_refused(loss: PreferenceLoss, given: Documents, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference_losses(section(loss), given)


def test_document_without_counted_tokens_is_not_hidden() -> None:
    """Its mean is NaN, which ends a run, instead of a plausible number."""
    given = Documents(torch.tensor([0.0, -1.0]), torch.tensor([0, 1]))
    assert preference_losses(section("simpo"), given).values.isnan().all()
