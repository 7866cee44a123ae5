"""First findings of profiles of real runs, each with one planted fault, and none without."""

from pathlib import Path

import pytest

from strata.platform.profile import trace
from strata.platform.recipe import Recipe
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.profile import machine
from strata.training.profile.analysis.findings import findings
from strata.training.profile.analysis.summary import summarize

from .planted import CASES, FIRST, LAST, MODEL, profile

pytestmark = [pytest.mark.rotation, pytest.mark.long]


@pytest.mark.parametrize("name", CASES)
def test_first_finding_is_the_planted_fault(name: str, small_recipe: Recipe, tmp_path: Path) -> None:
    case = CASES[name]
    recipe = case.recipe(small_recipe)
    tokens = shards.prepare(open_corpus(recipe.data), MODEL["vocab"], 0.1)
    run = tmp_path / "run"
    run.mkdir()
    traces = trace.read(profile(recipe, tokens, run, name))
    assert [each.rank for each in traces] == list(range(recipe.parallel.workers))
    assert all(each.facts["steps"] == list(range(FIRST, LAST + 1)) for each in traces)
    summary = summarize(traces, recipe)
    found = findings(summary, machine.of(summary))
    print([(rank.seconds, rank.own, rank.available) for rank in summary.ranks], summary.transfers, summary.step)
    print(*(f"{each.share:.3f} {each.sentence}" for each in found), sep="\n")
    assert [each.cause for each in found[:1]] == ([] if case.cause is None else [case.cause])
