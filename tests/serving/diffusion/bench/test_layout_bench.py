"""Layouts of `strata bench dit`: rounds, comparisons and failures with stand-ins, and real workers once."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from strata.planner.diffusion.layout_rules import PictureLayout
from strata.serving.diffusion.bench import report
from strata.serving.diffusion.bench.contenders import DIFFUSERS, OURS
from strata.serving.diffusion.bench.layouts import BATCH, LAYOUTS, Way, Workers, compare, measure
from strata.serving.diffusion.bench.models import SMALL


class StandIn(Workers):
    """Answers at once. Ring fails in the second round, PipeFusion is off by 0.01."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.orders: list[tuple[str, int]] = []

    def sample(self, way: Way, batch: int) -> tuple[float, Tensor]:
        self.orders.append((way.name, batch))
        if way.name == "ring 2" and self.orders.count(("ring 2", 1)) == 2:
            raise RuntimeError("worker died\ntrace")
        return 0.5 * batch, torch.tensor([0.0, 1.0]) + (0.01 if way.layout.pipefusion > 1 else 0.0)


def test_rounds_alternate_and_a_failed_layout_leaves() -> None:
    workers = StandIn(2)
    *_, rows = measure(workers, rounds=2)
    by_name = {row.name: row for row in rows}
    expected = [DIFFUSERS, OURS, "step cache", "ulysses 2", "ring 2", "cfg 2", "pipefusion 2"]
    assert list(by_name) == expected
    assert [name for name, _ in workers.orders[:7]] == expected  # the warm-up round
    assert by_name["ulysses 2"].seconds == [0.5, 0.5] and by_name["ulysses 2"].batch_seconds == [0.5 * BATCH] * 2
    assert by_name["ring 2"].trouble == "RuntimeError: worker died" and by_name["ring 2"].seconds == []
    assert by_name["ulysses 2"].psnr == "exact" and by_name["pipefusion 2"].psnr == pytest.approx(40.0, abs=0.01)
    text = report.layouts_table([asdict(row) for row in rows], SMALL)
    assert text.row_count == 7


def test_psnr_is_over_the_range_of_the_truth() -> None:
    truth = torch.tensor([0.0, 4.0])
    assert compare(truth + 1e-4 * 0.9, truth) == "exact"
    assert compare(truth + 0.4, truth) == pytest.approx(20 * math.log10(10), abs=1e-4)


@pytest.mark.rotation
def test_two_workers_sample_the_picture_of_one() -> None:
    config = {**SMALL.config, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16}
    model = replace(SMALL, config=config, size=64, steps=2)
    with Workers(model, 2) as workers:
        _, truth = workers.sample(Way(DIFFUSERS), 2)
        assert truth.shape == (2, 16, 8, 8)
        exact = [Way(layout.name(), layout) for layout in LAYOUTS if layout.workers == 2 and layout.pipefusion == 1]
        for way in (Way(OURS), *exact):
            seconds, latents = workers.sample(way, 2)
            assert compare(latents, truth) == "exact" and seconds > 0, way
        with pytest.raises(RuntimeError, match="does not work"):
            workers.sample(Way("three", PictureLayout(pipefusion=2, patches=99)), 1)
        assert workers.sample(Way("ring", PictureLayout(ring=2)), 1)[1].shape == (1, 16, 8, 8)  # the workers are still there
