"""Times of mixed steps beside the worksheet's formulas."""

from math import inf

import pytest

from strata.planner.catalogue import library
from strata.planner.serving.engine_step import Precision, decode, describe, prefill
from strata.planner.serving.step_times import StepTimes
from strata.planner.worksheet import Worksheet
from strata.platform.hardware import catalogue as hardware

ENGINES: list[tuple[str, str, int, Precision]] = [
    ("llama3-8b", "h100", 1, "bf16"),
    ("llama3-70b", "h100", 8, "fp8"),
    ("mixtral-8x7b", "h200", 2, "bf16"),
    ("deepseek-v3", "h200", 8, "fp8"),
]


def engine(model: str, gpu: str, tensor: int, precision: Precision) -> Worksheet:
    written = Worksheet("engine")
    describe(library.open_model(model), hardware.gpu(gpu), written, tensor, precision)
    return written


@pytest.mark.parametrize("settings", ENGINES)
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (1, 4000), (37, 900), (900, 2500)])
def test_decode_steps_equal_the_worksheet(settings: tuple[str, str, int, Precision], batch: int, context: int) -> None:
    described = engine(*settings)
    expected = decode(batch, context, Worksheet("tried", described))
    times = StepTimes(described)
    assert times.step(batch, batch * context, 0, 0) == pytest.approx(expected, rel=1e-12)
    constant, factor = times.decode_terms(batch)
    assert constant + factor * batch * context == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("settings", ENGINES)
@pytest.mark.parametrize(("prompt", "cached"), [(1, 0.0), (100, 0.0), (8000, 0.0), (8000, 0.75)])
def test_a_prompt_in_one_step_equals_the_worksheet(settings: tuple[str, str, int, Precision], prompt: int, cached: float) -> None:
    described = engine(*settings)
    expected = prefill(prompt, cached, Worksheet("tried", described))
    new = round(prompt * (1 - cached))
    pairs = new * (prompt - new / 2)
    assert StepTimes(described).step(0, 0, new, pairs) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("settings", ENGINES)
def test_a_mixed_step_takes_less_than_two_steps(settings: tuple[str, str, int, Precision]) -> None:
    times = StepTimes(engine(*settings))
    last = -inf
    for prompt in (1, 10, 100, 1000, 5000):
        mixed = times.step(64, 64_000, prompt, prompt**2 / 2)
        apart = times.step(64, 64_000, 0, 0), times.step(0, 0, prompt, prompt**2 / 2)
        assert max(apart) < mixed < sum(apart)
        assert last < mixed
        last = mixed
