"""Reference point of KTO: an estimate that does not depend on the division of the batch."""

import pytest
import torch

from strata.training.preferences.kl import kl_estimate, kl_sums


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
