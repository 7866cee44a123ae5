"""Attention cases in the shapes of diffusion transformers: work, bars, and equal results on a CPU at small sizes."""

from dataclasses import replace

import torch

from strata.kernels.bench.cases import flash_attention as cases
from strata.kernels.bench.harness import Settings, measure


def test_every_case_has_a_name_of_its_own_and_is_held_against_cudnn() -> None:
    found = cases.picture_cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names) and all(case.name in {one.name for one in cases.cases()} for case in found)
    assert all([(bar.least, bar.of) for bar in case.bars] == [(1.0, "SDPA cuDNN")] for case in found)
    assert {shape.dim for shape in cases.PICTURE_SHAPES} == {64, 72, 128} and not any(s.causal for s in cases.PICTURE_SHAPES)


def test_pairs_of_full_and_cross_attention() -> None:
    assert cases.Shape(2, 100, 4, 4, causal=False, model="x").pairs() == 2 * 100 * 100
    assert cases.Shape(2, 100, 4, 4, causal=False, keys=7, model="x").pairs() == 2 * 100 * 7
    assert cases.Shape(2, 100, 4, 4).pairs() == 100 * 100  # half of them


def test_contenders_agree_on_a_cpu_also_across() -> None:
    for shape in (cases.PICTURE_SHAPES[0], next(shape for shape in cases.PICTURE_SHAPES if shape.keys)):
        small = replace(shape, tokens=70, heads=2, kv_heads=2, keys=shape.keys and 33)
        row = measure(cases._case(small, backward=False), torch.device("cpu"), Settings(rounds=1, budget=1.0), lambda _: None)
        assert row.trouble is None and row.ours.trouble is None and not row.results["SDPA FA2"].wrong
        assert row.flops == 4 * 2 * 70 * (small.keys or 70) * 2 * small.dim
