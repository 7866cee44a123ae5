"""A user's folder of pictures: both ways to write captions, errors, sizes, and the prepared data."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.training.data.pictures import draws, folder, prepare

Change = Callable[[Path], object]


def save(path: Path, colour: str, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def paired(tmp_path: Path) -> Path:
    """Four pictures with a text file each."""
    where = tmp_path / "paired"
    where.mkdir()
    for colour in ("red", "lime", "blue", "white"):
        save(where / f"{colour}.png", colour)
        (where / f"{colour}.txt").write_text(f"a {colour} square\n")
    return where


@pytest.fixture
def listed(paired: Path) -> Path:
    """The same with metadata.jsonl."""
    rows = [{"file_name": path.name, "text": path.with_suffix(".txt").read_text()} for path in sorted(paired.glob("*.png"))]
    for path in paired.glob("*.txt"):
        path.unlink()
    (paired / folder.METADATA).write_text("\n".join(map(json.dumps, rows)) + "\n")
    return paired


def recipe(path: Path, *overrides: str) -> Recipe:
    return recipe_file.load("pictures", [f"data.path={path}", "model.picture.size=16", *overrides])


def test_text_files_and_metadata_are_the_same_captions(paired: Path, request: pytest.FixtureRequest) -> None:
    texts = folder.find(paired, "text")
    assert [(one.picture.name, one.caption) for one in texts[:2]] == [
        ("blue.png", "a blue square"),
        ("lime.png", "a lime square"),
    ]
    assert folder.find(request.getfixturevalue("listed"), "text") == texts


PAIRED_ERRORS: dict[str, tuple[Change, str]] = {
    "no caption": (lambda at: (at / "red.txt").unlink(), "red.txt is missing"),
    "empty caption": (lambda at: (at / "red.txt").write_text("  \n"), "red.txt is empty"),
    "not text": (lambda at: (at / "red.txt").write_bytes(b"\xff\xfe\xff"), "not UTF-8"),
    "one picture": (lambda at: [path.unlink() for path in at.iterdir() if path.stem != "red"], "has 1 pictures"),
    "none": (lambda at: [path.unlink() for path in at.iterdir()], "has 0 pictures"),
}


@pytest.mark.parametrize("case", PAIRED_ERRORS)
def test_errors_of_text_files(paired: Path, case: str) -> None:
    change, message = PAIRED_ERRORS[case]
    change(paired)
    with pytest.raises(UserError, match=message):
        folder.find(paired, "text")


LISTED_ERRORS = {
    "not JSON": ("{", "line 5 is not JSON"),
    "no object": ("[]", "line 5 is not a JSON object"),
    "no name": ('{"text": "a"}', "no 'file_name'"),
    "no caption": ('{"file_name": "red.png"}', "no 'text'"),
    "no file": ('{"file_name": "green.png", "text": "a"}', "green.png is no file"),
    "outside": ('{"file_name": "../out.png", "text": "a"}', "is no file in"),
    "twice": ('{"file_name": "red.png", "text": "a"}', "earlier line"),
}


@pytest.mark.parametrize("case", LISTED_ERRORS)
def test_errors_of_metadata(listed: Path, case: str) -> None:
    line, message = LISTED_ERRORS[case]
    save(listed.parent / "out.png", "red")
    with (listed / folder.METADATA).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        folder.find(listed, "text")


def test_another_field_of_the_captions(listed: Path) -> None:
    with pytest.raises(UserError, match="line 1 has no 'caption'"):
        folder.find(listed, "caption")


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        folder.find(tmp_path / "nothing", "text")


def test_a_damaged_picture(paired: Path) -> None:
    (paired / "red.png").write_bytes((paired / "red.png").read_bytes()[:40])
    with pytest.raises(UserError, match=r"red\.png cannot be read"):
        folder.read(paired / "red.png", 8)


def test_pictures_are_cut_to_the_middle_square_on_white(tmp_path: Path) -> None:
    wide = np.zeros((8, 24, 4), np.uint8)  # transparent black
    wide[:, 8:16] = (255, 0, 0, 255)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert (folder.read(tmp_path / "wide.png", 8) == (255, 0, 0)).all()
    assert folder.read(tmp_path / "wide.png", 4).shape == (4, 4, 3)
    save(tmp_path / "clear.png", "#00000000", mode="RGBA")
    assert (folder.read(tmp_path / "clear.png", 4) == 255).all()


def test_prepared_pictures(paired: Path, own_home: Path) -> None:
    chosen = recipe(paired)
    prepared = prepare.prepare(chosen.data, chosen.model)
    meta = prepare.read_meta(prepared)
    assert meta.count == {"train": 3, "validation": 1} and meta.size == 16 and not meta.generated
    train, validation = (prepare.read_captions(prepared, split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(one.caption for one in folder.find(paired, "text"))
    data = draws.Draws(prepared, "train", chosen.model, chosen.train)
    epochs = [[data.example(3 * epoch + draw).caption for draw in range(3)] for epoch in range(6)]
    assert all(sorted(epoch) == sorted(train) for epoch in epochs), "an epoch has each picture once"
    assert len(set(map(tuple, epochs))) > 1, "epochs have orders of their own"
    colours = {"red": (1, -1, -1), "lime": (-1, 1, -1), "blue": (-1, -1, 1), "white": (1, 1, 1)}
    for draw in range(3):
        example = data.example(draw)
        assert np.allclose(example.pixels, np.reshape(colours[example.caption.split()[1]], (3, 1, 1)))


def test_changed_pictures_and_sizes_are_prepared_again(paired: Path, own_home: Path) -> None:
    chosen = recipe(paired)
    before = prepare.prepare(chosen.data, chosen.model)
    assert prepare.prepare(chosen.data, chosen.model) == before
    assert prepare.prepare(chosen.data, recipe(paired, "model.picture.size=32").model) != before
    save(paired / "red.png", "maroon")
    assert prepare.prepare(chosen.data, chosen.model) != before
