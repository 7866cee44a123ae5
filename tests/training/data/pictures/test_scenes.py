"""Generated scenes and captions, their split, and the renderer's shapes."""

import math
from collections import Counter

import numpy as np
import pytest

from strata.training.data.pictures import scenes
from strata.training.data.pictures.rendering import coverage, from_bytes, render, to_bytes
from strata.training.data.pictures.scenes import COLOURS, FORMS, SHAPES, Combination, Scene

SHARE = 0.05


def test_a_scene_is_a_function_of_seed_and_index() -> None:
    first = [scenes.scene("train", SHARE, 3, index) for index in range(50)]
    assert first == [scenes.scene("train", SHARE, 3, index) for index in range(50)]
    assert len(set(first)) == 50
    assert first != [scenes.scene("train", SHARE, 4, index) for index in range(50)]
    assert first[0] == scenes.scene("train", SHARE, 3, 0)


def test_no_training_scene_has_a_held_out_combination() -> None:
    train = {scenes.scene("train", SHARE, 0, index).combination for index in range(2000)}
    held_out = {scenes.scene("validation", SHARE, 0, index).combination for index in range(500)}
    assert held_out == set(scenes.combinations("validation", SHARE))
    assert not train & held_out
    everything = scenes.combinations("train", SHARE) + scenes.combinations("validation", SHARE)
    assert len(everything) == len(set(everything)) == len(FORMS) * len(COLOURS) * (len(COLOURS) - 1) * len(SHAPES)
    assert 0.02 < len(held_out) / len(everything) < 0.1


def test_training_captions_have_every_word_of_held_out_ones() -> None:
    def words(split: scenes.Split, count: int) -> set[str]:
        return {word for index in range(count) for word in scenes.scene(split, SHARE, 0, index).caption.split()}

    assert words("validation", 500) <= words("train", 2000)


@pytest.mark.parametrize(
    ("form", "shape", "position", "caption"),
    [
        ("large", "circle", "", "a large red circle on a blue background"),
        ("small", "square", "left", "a small red square at the left on a blue background"),
        ("two", "triangle", "", "two small red triangles on a blue background"),
        ("two", "cross", "", "two small red crosses on a blue background"),
    ],
)
def test_captions(form: scenes.Form, shape: str, position: str, caption: str) -> None:
    assert Scene(Combination(form, "red", shape, "blue"), position, ((0.0, 0.0),), 0.3).caption == caption


def test_a_caption_names_its_combination_and_position() -> None:
    some = [scenes.scene("train", SHARE, 0, index) for index in range(300)]
    found = scenes.by_caption()
    assert all(found[scene.caption] == (scene.combination, scene.position) for scene in some)
    pairs = len(COLOURS) * (len(COLOURS) - 1) * len(SHAPES)
    assert len(found) == pairs * (1 + 1 + 1 + len(scenes.POSITIONS))


def test_a_caption_decides_about_its_picture_up_to_small_changes() -> None:
    middles = {"large": [(0.0, 0.0)], "two": [(-scenes.APART, 0.0), (scenes.APART, 0.0)]}
    shifts, stretches = [], []
    for index in range(1000):
        scene = scenes.scene("train", SHARE, 0, index)
        form = scene.combination.form
        expected = middles.get(form) or [scenes.POSITIONS.get(scene.position, (0.0, 0.0))]
        assert len(scene.centres) == len(expected)
        shifts += [np.subtract(found, sought) for found, sought in zip(scene.centres, expected, strict=True)]
        stretches.append(scene.radius / scenes.RADIUS[form] - 1)
    for found, limit in ((shifts, scenes.SHIFT), (stretches, scenes.STRETCH)):
        assert 0.9 * limit < np.max(found) < limit + 1e-9 and -limit - 1e-9 < np.min(found) < -0.9 * limit


def test_shapes_of_a_picture_have_background_around_them() -> None:
    for index in range(300):
        scene = scenes.scene("train", SHARE, 0, index)
        drawn = coverage(scene.combination.shape, scene.centres[0], scene.radius, 24)
        for centre in scene.centres[1:]:
            other = coverage(scene.combination.shape, centre, scene.radius, 24)
            assert not (drawn > 0).any(0)[(other > 0).any(0)].any(), "a column of background is between two shapes"
            drawn = np.maximum(drawn, other)
        assert max(drawn[[0, -1]].max(), drawn[:, [0, -1]].max()) < 0.5, "the border is background"


def test_shapes_of_named_positions_lie_there() -> None:
    seen: Counter[str] = Counter()
    for index in range(1000):
        scene = scenes.scene("train", SHARE, 0, index)
        if scene.position:
            x, y = scene.centres[0]
            side = {"left": -x, "right": x, "top": -y, "bottom": y}[scene.position]
            assert side > max(abs(y) if scene.position in ("left", "right") else abs(x), 0.3)
            seen[scene.position] += 1
    assert set(seen) == set(scenes.POSITIONS)


# Areas in radii squared: a square of 1.72 radii, a triangle with an inner circle of 0.6 radii, a cross of bars of 2 x 0.72 radii.
AREAS = {"circle": math.pi, "square": 1.72**2, "triangle": 3 * math.sqrt(3) * 0.36, "cross": 2 * 2 * 0.72 - 0.72**2}


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_has_the_area_of_the_shape(shape: str) -> None:
    radius, size = 0.5, 64
    share = coverage(shape, (0.1, -0.05), radius, size)
    area = share.sum() * (2 / size) ** 2
    assert area == pytest.approx(AREAS[shape] * radius**2, rel=0.02)
    assert set(np.unique(share)) - {0.0, 1.0}, "edges are anti-aliased"


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_move_with_their_centre(shape: str) -> None:
    still, moved = coverage(shape, (0.0, 0.0), 0.4, 32), coverage(shape, (2 / 32, -6 / 32), 0.4, 32)
    assert np.allclose(np.roll(still, (-3, 1), (0, 1)), moved, atol=1e-5)


def test_a_picture_has_the_colours_of_its_caption() -> None:
    scene = Scene(Combination("large", "orange", "circle", "purple"), "", ((0.0, 0.0),), 0.5)
    picture = render(scene, 32)
    assert picture.shape == (3, 32, 32) and picture.dtype == np.float32
    inside, outside = to_bytes(picture)[16, 16], to_bytes(picture)[0, 0]
    assert tuple(inside) == COLOURS["orange"] and tuple(outside) == COLOURS["purple"]
    assert np.array_equal(to_bytes(from_bytes(to_bytes(picture))), to_bytes(picture))


def test_two_shapes_are_both_drawn() -> None:
    scene = Scene(Combination("two", "white", "square", "black"), "", ((-0.5, 0.0), (0.5, 0.0)), 0.3)
    row = to_bytes(render(scene, 32))[16, :, 0]
    assert row[8] == row[24] == 245 and row[16] == 20
