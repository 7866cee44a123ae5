"""Draws of pictures, noise and timesteps: functions of seed and number alone."""

from pathlib import Path

import numpy as np
import pytest

from strata.platform import recipe_file
from strata.platform.recipe import Recipe
from strata.training.data.pictures import draws, prepare
from strata.training.data.pictures.captions import BEGIN_ID, END_ID
from strata.training.data.rows import DrawnPictures, RowBatch
from strata.training.data.shards import Split


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_HOME", str(tmp_path_factory.mktemp("home")))
        chosen = recipe()
        return prepare.prepare(chosen.data, chosen.model)


def recipe(*overrides: str) -> Recipe:
    return recipe_file.load("pictures", ["model.picture.size=16", *overrides])


def draw(prepared: Path, numbers: list[int], *overrides: str, split: Split = "train") -> RowBatch:
    chosen = recipe(*overrides)
    return draws.Draws(prepared, split, chosen.model, chosen.train).read(np.array(numbers))


def drawn(rows: RowBatch) -> DrawnPictures:
    assert rows.pictures
    return rows.pictures


def test_draws_do_not_depend_on_their_batch(prepared: Path) -> None:
    together, apart = draw(prepared, [4, 5, 6, 7]), draw(prepared, [7, 2, 5])
    for here, there in ((3, 0), (1, 2)):
        assert np.array_equal(together.tokens[here], apart.tokens[there])
        for key in ("pixels", "noise", "times"):
            assert np.array_equal(getattr(drawn(together), key)[here], getattr(drawn(apart), key)[there])
    assert not np.allclose(drawn(together).noise[0], drawn(together).noise[1])


def test_the_seed_changes_training_and_not_validation(prepared: Path) -> None:
    for split, same in (("train", False), ("validation", True)):
        one, other = (drawn(draw(prepared, [0, 1], f"train.seed={seed}", split=split)) for seed in (0, 1))  # type: ignore[arg-type]
        assert np.array_equal(one.noise, other.noise) == same
        assert np.array_equal(one.pixels, other.pixels) == same


def test_validation_noise_is_not_that_of_training(prepared: Path) -> None:
    assert not np.allclose(drawn(draw(prepared, [0])).noise, drawn(draw(prepared, [0], split="validation")).noise)


def test_ranks_share_the_draws_of_a_step(prepared: Path) -> None:
    chosen = recipe()
    order = draws.training_data(prepared, chosen.model, chosen.train).order
    whole = order(3, 8, 0, 1, 0)
    assert whole.tolist() == list(range(24, 32))
    assert np.concatenate([order(3, 8, rank, 4, 0) for rank in range(4)]).tolist() == whole.tolist()


def test_noise_and_timesteps_have_their_distributions(prepared: Path) -> None:
    found = drawn(draw(prepared, list(range(600)), "train.flow.logit_mean=0.5", "train.flow.logit_std=0.8"))
    logits = np.log(found.times / (1 - found.times))
    assert logits.mean() == pytest.approx(0.5, abs=0.12) and logits.std() == pytest.approx(0.8, abs=0.1)
    assert found.noise.mean() == pytest.approx(0, abs=0.01) and found.noise.std() == pytest.approx(1, abs=0.01)
    assert found.times.dtype == found.noise.dtype == found.pixels.dtype == np.float32


def test_captions_are_dropped_in_training_only(prepared: Path) -> None:
    empty = [BEGIN_ID, END_ID]
    share = "train.flow.caption_dropout=0.4"
    dropped = [row[:2].tolist() == empty for row in draw(prepared, list(range(400)), share).tokens]
    assert np.mean(dropped) == pytest.approx(0.4, abs=0.08)
    assert not any(row[:2].tolist() == empty for row in draw(prepared, list(range(50)), share, split="validation").tokens)
    none = draw(prepared, list(range(100)), "train.flow.caption_dropout=0")
    assert not any(row[:2].tolist() == empty for row in none.tokens)


def test_a_drop_does_not_change_the_noise(prepared: Path) -> None:
    one, other = (drawn(draw(prepared, list(range(20)), f"train.flow.caption_dropout={share}")) for share in (0, 0.9))
    assert np.array_equal(one.noise, other.noise) and np.array_equal(one.times, other.times)
