"""Reference point of KTO: mismatched pairs, and an estimate that does not depend on the division of the batch."""

import pytest
import torch

from strata.training.preferences.kl import kl_estimate, kl_sums, mismatched


@pytest.mark.parametrize("documents", [4, 6, 32])
def test_answers_come_from_another_pair(documents: int) -> None:
    paired = mismatched(documents)
    assert sorted(paired) == list(range(documents))  # each answer once
    assert all(answer // 2 != document // 2 for document, answer in enumerate(paired))


@pytest.mark.parametrize("documents", [0, 2, 3, 5])
def test_one_pair_has_no_other_answers(documents: int) -> None:
    with pytest.raises(ValueError, match=f"at least two pairs in a global batch, got {documents} documents"):
        mismatched(documents)


def test_estimate_is_the_mean_of_the_whole_batch() -> None:
    logp, reference = torch.tensor([-1.0, -2.0, -6.0]), torch.tensor([-3.0, -3.0, -5.0])
    assert kl_estimate(kl_sums(logp, reference)).item() == pytest.approx((2 + 1 - 1) / 3)
    parts = kl_sums(logp[:1], reference[:1]) + kl_sums(logp[1:], reference[1:]) + kl_sums(logp[:0], reference[:0])
    assert kl_estimate(parts).item() == pytest.approx(2 / 3)  # and not (2 + 0) / 2, the mean of two means


def test_estimate_is_not_negative() -> None:
    assert kl_estimate(kl_sums(torch.tensor([-4.0]), torch.tensor([-3.0]))).item() == 0
    assert kl_estimate(kl_sums(torch.tensor([-3.0]), torch.tensor([-3.5]))).item() == pytest.approx(0.5)


def test_estimate_has_no_gradient() -> None:
    logp = torch.tensor([-1.0], requires_grad=True)
    assert not kl_estimate(kl_sums(logp, torch.tensor([-3.0]))).requires_grad


def test_other_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the same documents"):
        kl_sums(torch.zeros(3), torch.zeros(1))
