"""Shapes of diffusion transformers, from `models.yaml`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strata.planner.diffusion.layout_rules import Splittable
from strata.platform.errors import UserError
from strata.platform.hardware.catalogue_file import Catalogue, parse, read

MODELS = Path(__file__).parent / "models.yaml"
PUBLISHED = "published_parameters_b"
PIXELS = 16  # per token in each direction: 8 per latent pixel, 2 latent pixels per token
FRAMES = 4  # per latent frame, after the first


@dataclass(frozen=True)
class PictureShape:
    """A diffusion transformer. `double` blocks have weights of their own for text and picture (MMDiT), `single` blocks share
    them, `plain` blocks hold the picture alone and attend to the text across, if at all. The feed-forward width is 4 x hidden.
    `size`, `frames` and `steps` are the defaults of a plan."""

    name: str
    hidden: int
    heads: int
    text: int
    size: int
    steps: int
    two_passes: bool
    double_blocks: int = 0
    single_blocks: int = 0
    plain_blocks: int = 0
    cross_attention: bool = False
    frames: int = 1
    text_parameters_b: float = 0.0

    @property
    def blocks(self) -> int:
        return self.double_blocks + self.single_blocks + self.plain_blocks

    @property
    def joint_text(self) -> int:
        """Text tokens in self-attention."""
        return 0 if self.plain_blocks else self.text

    @property
    def parameters(self) -> float:
        """Weights of the blocks: 12 hidden^2 per stream (query, key, value, output, feed-forward up and down), and the adaptive
        norms, 6 hidden^2 per stream, 3 in single blocks. PixArt shares one adaptive norm."""
        plain = 12 + 4 if self.cross_attention else 12 + 6
        return self.hidden**2 * (self.double_blocks * 2 * 18 + self.single_blocks * 15 + self.plain_blocks * plain)


@dataclass(frozen=True)
class Request:
    """A picture or video to sample. `guided`: with classifier-free guidance in two passes."""

    width: int
    height: int
    steps: int
    frames: int = 1
    batch: int = 1
    guided: bool = True

    @property
    def tokens(self) -> int:
        return (self.width // PIXELS) * (self.height // PIXELS) * ((self.frames - 1) // FRAMES + 1)

    def check(self) -> None:
        for name, side in (("width", self.width), ("height", self.height)):
            if side < PIXELS or side % PIXELS:
                raise UserError(
                    f"A {name} of {side} pixels is not a positive multiple of {PIXELS}.", f"Use a {name} that is one."
                )
        if (self.frames - 1) % FRAMES:
            raise UserError(f"{self.frames} frames are not one more than a multiple of {FRAMES}.", "Use 1, 5, 9, ... frames.")

    def passes(self, shape: PictureShape) -> int:
        return 2 if shape.two_passes and self.guided else 1

    def splittable(self, shape: PictureShape) -> Splittable:
        return Splittable(shape.heads, shape.blocks, self.tokens, self.passes(shape) == 2)


def picture_model(name: str) -> PictureShape:
    return _models().find("diffusion transformer", name)


def picture_models() -> list[PictureShape]:
    return list(_models().entries.values())


def published_parameters(name: str) -> float:
    """Billions of parameters, by the authors."""
    return float(_entries()[picture_model(name).name][PUBLISHED])


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return read(MODELS)


@cache
def _models() -> Catalogue[PictureShape]:
    shapes = {name: {key: value for key, value in entry.items() if key != PUBLISHED} for name, entry in _entries().items()}
    return parse(shapes, PictureShape, MODELS.name)
