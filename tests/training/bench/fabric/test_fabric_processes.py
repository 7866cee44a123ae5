"""`strata bench fabric` between real processes over gloo, one of them slow."""

import json
from pathlib import Path

import pytest
from slow_member import DELAY_S, SLOW_RANK, SlowMember

from strata.training.bench.fabric import judgement


@pytest.mark.slow
def test_a_rank_that_is_made_slow_is_named(tmp_path: Path) -> None:
    file = tmp_path / "fabric.json"
    settings = judgement.Settings((2**16,), 8, 0.7, json=file)
    assert judgement.on_this_machine(3, settings, SlowMember) == [f"process {SLOW_RANK}"]
    written = json.loads(file.read_text())
    assert [one["node"] for one in written["verdicts"]] == [f"process {rank}" for rank in range(3)]
    assert written["verdicts"][SLOW_RANK]["ranks"] == [SLOW_RANK]
    assert [one["bytes"] for one in written["all_reduce"]] == [2**16]
    assert all(one["seconds"] >= DELAY_S for one in written["all_reduce"]), "all ranks wait for the slow one"
