import pytest

from strata.training.schedule import learning_rate


def rates(steps: int = 100, warmup: int = 10) -> list[float]:
    return [learning_rate(step, steps, 1.0, warmup, 0.1) for step in range(steps + 1)]


def test_rate_rises_to_the_peak_and_decays_to_the_minimum() -> None:
    all_rates = rates()
    assert all_rates[:11] == sorted(all_rates[:11]) and 0 < all_rates[0] < 0.1
    assert all_rates[10] == pytest.approx(1.0)
    assert all_rates[10:] == sorted(all_rates[10:], reverse=True)
    assert all_rates[55] == pytest.approx(0.55)
    assert all_rates[100] == pytest.approx(0.1)


def test_without_warmup_starts_at_the_peak() -> None:
    assert learning_rate(0, 10, 3e-3, 0, 0.1) == pytest.approx(3e-3)
