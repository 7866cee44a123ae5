"""Generated scenes and their captions: one or two shapes of a colour on a background of another.

A scene is a function of seed and index. A share of the combinations of form, colour, shape and background is held out: no
training caption has one of them, though every word of theirs occurs in other captions.

A caption decides about its picture up to small shifts and sizes. With places that captions do not name, the mean picture of a
caption would be a blur whose outline says little about the shape, and a model would learn from captions about outlines slowly.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import numpy as np

from strata.training.data.shards import Split

Form = Literal["large", "small", "two"]
FORMS: tuple[Form, ...] = ("large", "small", "two")
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 75, 220),
    "yellow": (240, 215, 50),
    "purple": (150, 55, 185),
    "orange": (245, 140, 30),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
# Positions of a small shape that are not the centre: from the picture's centre, in half widths, right and down.
POSITIONS = {
    "left": (-0.45, 0.0),
    "right": (0.45, 0.0),
    "top": (0.0, -0.45),
    "bottom": (0.0, 0.45),
}
RADIUS = {"large": 0.68, "small": 0.37, "two": 0.37}  # in half widths
SHIFT = 0.05  # of a centre at most, in each direction, in half widths
STRETCH = 0.04  # of a radius at most, relative
APART = 0.48  # two shapes from the picture's centre
VERSION = 2  # of everything in this module and in rendering.py that decides about a picture


@dataclass(frozen=True)
class Combination:
    """Words of a caption that decide about its split."""

    form: Form
    colour: str
    shape: str
    background: str

    def held_out(self, share: float) -> bool:
        digest = hashlib.blake2b(" ".join((self.form, self.colour, self.shape, self.background)).encode(), digest_size=8)
        return int.from_bytes(digest.digest()) < share * 2**64


@dataclass(frozen=True)
class Scene:
    """A combination at a place. `position` is a key of POSITIONS, empty for the centre. `centres` and `radius` are in half
    widths, from the picture's centre."""

    combination: Combination
    position: str
    centres: tuple[tuple[float, float], ...]
    radius: float

    @property
    def caption(self) -> str:
        return caption(self.combination, self.position)


def caption(words: Combination, position: str) -> str:
    if words.form == "two":
        plural = "crosses" if words.shape == "cross" else f"{words.shape}s"
        return f"two small {words.colour} {plural} on a {words.background} background"
    place = f" at the {position}" if position else ""
    return f"a {words.form} {words.colour} {words.shape}{place} on a {words.background} background"


@cache
def by_caption() -> dict[str, tuple[Combination, str]]:
    """Combination and position of every caption."""
    everything = combinations("train", 0.0)
    return {caption(words, at): (words, at) for words in everything for at in _positions(words.form)}


def _positions(form: Form) -> tuple[str, ...]:
    return ("", *POSITIONS) if form == "small" else ("",)


@cache
def combinations(split: Split, share: float) -> tuple[Combination, ...]:
    """Every combination of a split, when `share` of all are held out."""
    found = (
        Combination(form, colour, shape, background)
        for form, colour, shape, background in product(FORMS, COLOURS, SHAPES, COLOURS)
        if colour != background
    )
    return tuple(each for each in found if each.held_out(share) == (split == "validation"))


def scene(split: Split, share: float, seed: int, index: int) -> Scene:
    """The scene of an index."""
    random = np.random.default_rng([seed, index, 0 if split == "train" else 1])
    some = combinations(split, share)
    words = some[int(random.integers(len(some)))]
    radius = RADIUS[words.form] * random.uniform(1 - STRETCH, 1 + STRETCH)
    position = str(random.choice(_positions(words.form)))
    x, y = POSITIONS.get(position, (0.0, 0.0)) + random.uniform(-SHIFT, SHIFT, 2)
    beside = (-APART, APART) if words.form == "two" else (0.0,)
    return Scene(words, position, tuple((float(x + right), float(y)) for right in beside), float(radius))
