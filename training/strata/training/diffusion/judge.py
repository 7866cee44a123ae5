"""Automatic judge of pictures against generated captions: compares colours with the palette and outlines with the renderer's."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from strata.training.data.pictures.rendering import coverage
from strata.training.data.pictures.scenes import COLOURS, POSITIONS, RADIUS, SHAPES, Combination

Mask = NDArray[np.bool_]
LEAST_CONTRAST = 40.0  # distance of a shape's colour from the background's, of 441 at most
LEAST_SHARE = 0.3  # of the largest part's area, for a part that counts
SCALES = (0.94, 1.0, 1.06)  # of an outline: the sides of a part's box are whole pixels, those of its shape are not
LARGE = (RADIUS["large"] + RADIUS["small"]) / 2


@dataclass(frozen=True)
class Verdict:
    """The features of a caption that a picture has."""

    background: bool
    colour: bool
    shape: bool
    number: bool
    size: bool
    position: bool

    @property
    def right(self) -> bool:
        return all(asdict(self).values())


FEATURES = tuple(field.name for field in fields(Verdict))


def judge(picture: NDArray[np.uint8], words: Combination, position: str) -> Verdict:
    """Verdict on a picture of [size, size, 3] for the words of a caption. Without a position it may be anywhere."""
    pixels = picture.astype(np.float32)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground = np.median(border, axis=0)
    contrast = np.linalg.norm(pixels - ground, axis=-1)
    strongest = float(np.quantile(contrast, 0.98))
    background = _nearest(ground) == words.background
    if strongest < LEAST_CONTRAST:
        return Verdict(background, False, False, False, False, False)
    found = _parts(contrast > strongest / 2)
    colour = _nearest(np.median(pixels[contrast > 0.8 * strongest], axis=0))
    fits = [_fit(part) for part in found]
    radius = float(np.mean([fit.radius for fit in fits]))
    return Verdict(
        background=background,
        colour=colour == words.colour,
        shape=all(fit.shape == words.shape for fit in fits),
        number=len(found) == (2 if words.form == "two" else 1),
        size=(radius > LARGE) == (words.form == "large"),
        position=not position or _is_at(position, found[0]),
    )


def accuracy(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Share of pictures in which all features are right, and for each feature."""
    shares = {feature: float(np.mean([getattr(one, feature) for one in verdicts])) for feature in FEATURES}
    return {"all": float(np.mean([one.right for one in verdicts]))} | shares


def _nearest(colour: NDArray[np.float32]) -> str:
    return min(COLOURS, key=lambda name: float(np.linalg.norm(colour - np.asarray(COLOURS[name]))))


def _parts(mask: Mask) -> list[Mask]:
    """Connected parts, largest first, without specks."""
    left, parts = {(int(y), int(x)) for y, x in np.argwhere(mask)}, []
    while left:
        todo, part = [left.pop()], np.zeros_like(mask)
        while todo:
            y, x = todo.pop()
            part[y, x] = True
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            todo += near
        parts.append(part)
    parts.sort(key=lambda part: -int(part.sum()))
    return [part for part in parts if part.sum() >= LEAST_SHARE * parts[0].sum()]


@dataclass(frozen=True)
class _Fit:
    shape: str
    radius: float


def _fit(part: Mask) -> _Fit:
    """The shape whose outline, at the place and of about the size of the part, has the most pixels in common with it."""
    size = len(part)
    (top, bottom), (left, right) = ((int(at.min()), int(at.max()) + 1) for at in np.nonzero(part))
    x, y = (left + right) / size - 1, (top + bottom) / size - 1
    width, height = 2 * (right - left) / size, 2 * (bottom - top) / size
    half = (width + height) / 4
    # Of a triangle, width and height are 2.078 and 1.8 radii, and the centre is 0.3 radii below that of the box.
    tall = (width / 2.078 + height / 1.8) / 2
    outlines = {
        "circle": (x, y, half),
        "square": (x, y, half / 0.86),
        "triangle": (x, y + 0.3 * tall, tall),
        "cross": (x, y, half),
    }
    assert set(outlines) == set(SHAPES)

    def overlap(shape: str) -> float:
        at_x, at_y, radius = outlines[shape]
        scaled = (coverage(shape, (at_x, at_y), scale * radius, size) > 0.5 for scale in SCALES)
        return max(float((outline & part).sum() / (outline | part).sum()) for outline in scaled)

    best = max(outlines, key=overlap)
    return _Fit(best, outlines[best][2])


def _is_at(position: str, part: Mask) -> bool:
    """True if no other named position, nor the centre, is nearer to a part's middle."""
    size = len(part)
    y, x = ((at.mean() + 0.5) * 2 / size - 1 for at in np.nonzero(part))
    places = POSITIONS | {"": (0.0, 0.0)}
    return min(places, key=lambda name: (places[name][0] - x) ** 2 + (places[name][1] - y) ** 2) == position
