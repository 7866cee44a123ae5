"""Step times of a running engine, found again from its steps."""

import random

import pytest

from strata.serving.scaling.step_fit import HALF_LIFE, LEAST_STEPS, LinearSteps, RecentShare, StepFit


def fitted(truth: LinearSteps, steps: int = 600, noise: float = 0.1, seed: int = 0) -> LinearSteps:
    draw, fit = random.Random(seed), StepFit()
    for _ in range(steps):
        streams, tokens = draw.randint(0, 60), draw.choice([0, 0, 0, 200, 1500])
        fit.add(streams, tokens, truth.step(streams, 0, tokens, 0) * draw.uniform(1 - noise, 1 + noise))
    found = fit.times()
    assert found is not None
    return found


@pytest.mark.parametrize("truth", [LinearSteps(0.01, 0.0002, 0.00004), LinearSteps(0.001, 0.001, 0.0005)])
def test_terms_are_found_again(truth: LinearSteps) -> None:
    found = fitted(truth)
    for streams, tokens in ((1, 0), (60, 0), (10, 1500)):
        assert found.step(streams, 0, tokens, 0) == pytest.approx(truth.step(streams, 0, tokens, 0), rel=0.1)
    assert found.prompt_token_s == pytest.approx(truth.prompt_token_s, rel=0.1)


def test_too_few_steps_say_nothing() -> None:
    fit = StepFit()
    for _ in range(LEAST_STEPS - 1):
        fit.add(1, 0, 0.01)
    fit.add(1, 0, 0.0)  # the clock did not advance
    assert fit.times() is None
    fit.add(1, 0, 0.01)
    assert fit.times() is not None


def test_steps_that_are_all_alike_give_a_finite_answer() -> None:
    fit = StepFit()
    for _ in range(200):
        fit.add(1, 0, 0.02)
    found = fit.times()
    assert found is not None and found.step(1, 0, 0, 0) == pytest.approx(0.02, rel=0.02)
    assert found.prompt_token_s == 0.0 and 0 <= found.stream_s < 0.02


def test_no_term_is_negative() -> None:
    fit = StepFit()
    for k in range(300):
        fit.add(k % 10, 0, 0.02 - 0.001 * (k % 10))
    found = fit.times()
    assert found is not None and found.stream_s == 0.0 and 0.01 < found.fixed_s < 0.02


def test_old_steps_fade() -> None:
    fit = StepFit()
    for k in range(8 * HALF_LIFE):
        fit.add(k % 7, 0, 1.0 if k < HALF_LIFE else 0.01)
    found = fit.times()
    assert found is not None and found.step(3, 0, 0, 0) < 0.03


def test_share_of_hits_fades() -> None:
    share = RecentShare()
    assert share.share == 0.0
    share.add(1000, 250)
    assert share.share == 0.25
    share.add(RecentShare.TOKENS * 10, 0)
    assert share.share < 0.001
