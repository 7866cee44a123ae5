"""Draws scenes with anti-aliased edges: a pixel's share of a shape follows from its signed distance to the shape's edge."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.training.data.pictures.scenes import COLOURS, Scene

Pixels = NDArray[np.float32]


def render(scene: Scene, size: int) -> Pixels:
    """[3, size, size] from -1 to 1."""
    words = scene.combination
    share = np.zeros((size, size), np.float32)
    for centre in scene.centres:
        share = np.maximum(share, coverage(words.shape, centre, scene.radius, size))
    colour, background = (np.array(COLOURS[name], np.float32)[:, None, None] for name in (words.colour, words.background))
    return ((background + (colour - background) * share) / 127.5 - 1).astype(np.float32)


def coverage(shape: str, centre: tuple[float, float], radius: float, size: int) -> Pixels:
    """[size, size] from 0 to 1: the share of each pixel inside a shape. Lengths are in half widths of the picture."""
    at = (np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1
    x, y = np.meshgrid(at - centre[0], at - centre[1])
    return np.asarray(np.clip(0.5 - _distance(shape, x, y, radius) * (size / 2), 0, 1), np.float32)


def _distance(shape: str, x: Pixels, y: Pixels, radius: float) -> NDArray[np.floating[Any]]:
    """Signed distance to the edge, negative inside. Near an outer corner it is that to the nearest side."""
    match shape:
        case "circle":
            return np.asarray(np.hypot(x, y) - radius)
        case "square":
            return np.asarray(np.maximum(np.abs(x), np.abs(y)) - 0.86 * radius)
        case "triangle":  # equilateral, one corner above
            return np.asarray(np.maximum(np.abs(x) * np.float32(0.8660254) - y * 0.5, y) - 0.6 * radius)
        case "cross":
            wide, narrow = radius, 0.36 * radius
            bar = np.maximum(np.abs(x) - wide, np.abs(y) - narrow)
            return np.asarray(np.minimum(bar, np.maximum(np.abs(x) - narrow, np.abs(y) - wide)))
    raise AssertionError(shape)


def to_bytes(picture: Pixels) -> NDArray[np.uint8]:
    """[size, size, 3] from 0 to 255."""
    return np.asarray(np.clip(np.rint((picture.transpose(1, 2, 0) + 1) * 127.5), 0, 255), np.uint8)


def from_bytes(picture: NDArray[np.uint8]) -> Pixels:
    """[3, size, size] from -1 to 1."""
    return (picture.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)
