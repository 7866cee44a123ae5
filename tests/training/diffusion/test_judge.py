"""The judge accepts the renderer's pictures, with noise too, and finds each wrong feature."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from strata.training.data.pictures import scenes
from strata.training.data.pictures.rendering import render, to_bytes
from strata.training.data.pictures.scenes import COLOURS, FORMS, SHAPES, Combination, Scene
from strata.training.diffusion import judge as judging
from strata.training.diffusion.judge import FEATURES, Verdict, accuracy

SIZE = 24


def picture(scene: Scene, noise: float = 0.0, size: int = SIZE) -> np.ndarray:
    random = np.random.default_rng(0)
    return to_bytes(render(scene, size) + noise * random.standard_normal((3, size, size)).astype(np.float32))


def judge(picture: np.ndarray, scene: Scene) -> Verdict:
    return judging.judge(picture, scene.combination, scene.position)


@pytest.mark.parametrize(("size", "noise"), [(24, 0.0), (24, 0.08), (32, 0.08)])
def test_the_renderers_pictures_are_right(size: int, noise: float) -> None:
    some = [scenes.scene("train", 0.05, 1, index) for index in range(150)]
    assert accuracy([judge(picture(scene, noise, size), scene) for scene in some])["all"] >= 0.98


def scene(
    form: scenes.Form = "small", colour: str = "red", shape: str = "circle", ground: str = "white", at: str = "left"
) -> Scene:
    centres = {"large": ((0.0, 0.0),), "small": (scenes.POSITIONS[at],), "two": ((-0.45, 0.0), (0.45, 0.0))}[form]
    return Scene(Combination(form, colour, shape, ground), at if form == "small" else "", centres, scenes.RADIUS[form])


@pytest.mark.parametrize(
    ("drawn", "wrong"),
    [
        (scene(colour="blue"), "colour"),
        (scene(ground="yellow"), "background"),
        *((scene(shape=shape), "shape") for shape in SHAPES if shape != "circle"),
        *((scene(at=at), "position") for at in scenes.POSITIONS if at != "left"),
    ],
)
def test_a_wrong_feature_is_found_alone(drawn: Scene, wrong: str) -> None:
    verdict = judge(picture(drawn), scene())
    assert {feature for feature, right in asdict(verdict).items() if not right} == {wrong}
    assert not verdict.right


def test_wrong_number_and_size() -> None:
    assert not judge(picture(scene(form="two")), scene()).number
    assert not judge(picture(scene()), scene(form="two")).number
    assert not judge(picture(scene(form="large")), scene()).size
    assert not judge(picture(scene()), scene(form="large")).size


@pytest.mark.parametrize("colour", COLOURS)
def test_an_empty_picture_has_its_background_only(colour: str) -> None:
    empty = np.full((SIZE, SIZE, 3), COLOURS[colour], np.uint8)
    verdict = judge(empty, scene(ground=colour, colour="red" if colour != "red" else "blue"))
    assert verdict == Verdict(True, *[False] * (len(FEATURES) - 1))


def test_accuracy_counts_each_feature() -> None:
    right = Verdict(*[True] * len(FEATURES))
    found = accuracy([right, right, replace(right, shape=False), replace(right, shape=False, colour=False)])
    assert found["all"] == found["shape"] == 0.5 and found["colour"] == 0.75 and found["background"] == 1
    assert list(found) == ["all", *FEATURES] and len(FORMS) == 3
