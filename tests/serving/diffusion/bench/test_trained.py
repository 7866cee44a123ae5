"""Quality of the step cache and of PipeFusion for a model in a folder: rows, files, and real workers once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from strata.planner.diffusion.layout_rules import PictureLayout
from strata.platform.errors import UserError
from strata.serving.diffusion.bench import report, trained
from strata.serving.diffusion.bench.layouts import Way
from strata.serving.diffusion.bench.trained import WAYS, Drawn, captions_of, quality


def picture(value: int) -> np.ndarray:
    return np.full((8, 8, 3), value, np.uint8)


def test_quality_is_over_all_pictures() -> None:
    truth = [picture(100), picture(100)]
    row = quality(Way("cache", cache=0.1), Drawn([picture(100), picture(120)], 2.0, 0.25), truth)
    assert row.psnr == pytest.approx(10 * math.log10(255**2 / 200))  # the mean of 0 and 20 squared
    assert row.ssim == pytest.approx((1 + (2 * 100 * 120 + 6.5025) / (100**2 + 120**2 + 6.5025)) / 2)
    assert (row.name, row.workers, row.seconds, row.skipped) == ("cache", 1, 2.0, 0.25)
    same = quality(Way("two", PictureLayout(pipefusion=2)), Drawn(truth, 1.0, 0.0), truth)
    assert (same.psnr, same.ssim, same.workers) == (None, pytest.approx(1.0), 2)


def test_captions_are_read_once_each(tmp_path: Path) -> None:
    path = tmp_path / "metadata.jsonl"
    path.write_text("".join(json.dumps({"text": f"caption {i // 2}"}) + "\n\n" for i in range(2 * trained.MOST + 2)))
    assert captions_of(path) == [f"caption {i}" for i in range(trained.MOST)]


@pytest.mark.parametrize("content", [None, "", "text\n", '{"caption": "a"}\n', "[1]\n"])
def test_unusable_captions_are_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "metadata.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="captions"):
        captions_of(path)


def test_every_way_has_a_row_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(model: Path, way: Way, captions: list[str]) -> Drawn:
        return Drawn([picture(100 + 10 * WAYS.index(way))] * len(captions), 1.0, 0.0)

    monkeypatch.setattr(trained, "draw", draw)
    rows = list(trained.measure(tmp_path, ["a", "b"], tmp_path / "to"))
    assert [row.name for row in rows] == [way.name for way in WAYS] and rows[0].psnr is None
    assert [row.psnr for row in rows[1:]] == [pytest.approx(20 * math.log10(255 / (10 * i))) for i in (1, 2, 3)]
    assert report.quality_table([row.__dict__ for row in rows], "run", 2).row_count == len(WAYS)
    folders = sorted((tmp_path / "to").iterdir())
    assert [folder.name for folder in folders] == sorted(way.name.replace(" ", "-") for way in WAYS)
    one = tmp_path / "to" / "one-worker"
    assert [json.loads(line) for line in (one / "metadata.jsonl").read_text().splitlines()] == [
        {"file_name": "000.png", "text": "a"},
        {"file_name": "001.png", "text": "b"},
    ]
    assert np.array_equal(np.asarray(Image.open(one / "001.png")), picture(100))


@pytest.mark.rotation
def test_workers_draw_the_model_of_a_folder(picture_models: dict[str, Path]) -> None:
    captions = ["a red circle", "two blue square"]
    alone, cached, piped = (
        trained.draw(picture_models["own"], way, captions) for way in (Way("one"), Way("c", cache=0.6), WAYS[-1])
    )
    assert alone.pictures[0].shape == (32, 32, 3) and len(alone.pictures) == 2
    assert alone.skipped == piped.skipped == 0 < cached.skipped < 1
    assert quality(WAYS[-1], piped, alone.pictures).psnr is not None, "PipeFusion is not exact"


@pytest.mark.slow
def test_a_workers_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model_index"):
        trained.draw(tmp_path, WAYS[-1], ["a"])
