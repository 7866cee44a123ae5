"""Generated scenes and their captions: one or two shapes of a colour on a background of another.

A scene is a function of seed and index. A share of the combinations of form, colour, shape and background is held out: no
training caption has one of them, though every word of theirs occurs in other captions.
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
# Positions of a small shape: centre of the shape from the picture's centre, in half widths, right and down.
POSITIONS = {
    "left": (-0.45, 0.0),
    "right": (0.45, 0.0),
    "top": (0.0, -0.45),
    "bottom": (0.0, 0.45),
}
RADIUS = {"large": 0.62, "small": 0.33, "two": 0.33}  # in half widths
VERSION = 1  # of everything in this module and in rendering.py that decides about a picture


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
    """A combination at a place. `position` is a key of POSITIONS, empty for a place that the caption does not name. `centres` and
    `radius` are in half widths, from the picture's centre."""

    combination: Combination
    position: str
    centres: tuple[tuple[float, float], ...]
    radius: float

    @property
    def caption(self) -> str:
        words = self.combination
        if words.form == "two":
            plural = "crosses" if words.shape == "cross" else f"{words.shape}s"
            return f"two small {words.colour} {plural} on a {words.background} background"
        place = f" at the {self.position}" if self.position else ""
        return f"a {words.form} {words.colour} {words.shape}{place} on a {words.background} background"


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
    radius = RADIUS[words.form] * random.uniform(0.92, 1.08)
    if words.form == "two":
        along = random.uniform(0.42, 0.48)
        centre = (along, 0.0) if random.random() < 0.5 else (0.0, along)
        middle = random.uniform(-0.08, 0.08, 2)
        centres = tuple((float(middle[0] + sign * centre[0]), float(middle[1] + sign * centre[1])) for sign in (-1, 1))
        return Scene(words, "", centres, float(radius))
    position = str(random.choice(["", *POSITIONS])) if words.form == "small" else ""
    spread = 0.12 if position or words.form == "large" else 0.5
    x, y = POSITIONS.get(position, (0.0, 0.0)) + random.uniform(-spread, spread, 2)
    return Scene(words, position, ((float(x), float(y)),), float(radius))
