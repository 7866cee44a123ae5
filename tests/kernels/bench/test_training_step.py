"""`strata bench compile` on a tiny model: the contenders train the same, and a failure leaves the others."""

import math

import pytest

from strata.kernels.bench import training_step
from strata.kernels.bench.training_step import Measurement, Settings, measure, table
from strata.platform.errors import UserError

SETTINGS = Settings("tiny", batch=2, tokens=16, steps=2, warmup=1)


def test_backend_strata_trains_as_eager_torch() -> None:
    theirs = measure("eager", SETTINGS)
    ours = measure("strata", SETTINGS, {"tail": "eager"})
    assert math.isclose(ours.loss, theirs.loss, rel_tol=1e-6)
    assert math.isclose(ours.last_loss, theirs.last_loss, rel_tol=1e-5)
    assert ours.last_loss != ours.loss
    assert len(ours.seconds) == 2 and ours.tokens_per_second > 0
    assert ours.fused == {
        "rms_norm": 1,
        "add_rms_norm": 4,
        "rope": 2,
        "swiglu": 2,
        "flash_attention": 2,
        "linear_cross_entropy": 1,
    }


def test_table_has_ratios_and_errors() -> None:
    rows = [
        Measurement("strata", [0.5], 200.0, 2**31, loss=4.0),
        Measurement("inductor", [1.0], 100.0, 2**32, loss=4.04),
        Measurement("liger", error="ModuleNotFoundError: liger_kernel"),
    ]
    columns = {str(column.header): list(column.cells) for column in table(rows).columns}
    assert columns["Strata vs"] == ["1.00x", "2.00x", ""]
    assert columns["peak memory"] == ["2.0 GiB", "4.0 GiB", ""]
    assert columns["loss error"] == ["0.0e+00", "1.0e-02", ""]
    assert columns["tokens/s"][2].startswith("ModuleNotFoundError")


def test_unknown_contenders_are_refused() -> None:
    with pytest.raises(UserError, match="no contender 'jit'"):
        training_step.bench(SETTINGS, ("jit",), None)
