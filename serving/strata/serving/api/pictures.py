"""Requests for pictures: OpenAI's `POST /v1/images/generations`, and the fields that a diffusion model has beside it.

`seed`, `steps`, `guidance`, `negative_prompt` and `progress` are Strata's own; the official client sends them as `extra_body`.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from strata.platform.recipe import PictureServingSection
from strata.serving.api.requests import ApiError, validate

MAX_PROMPT_CHARACTERS = 32_000  # as in OpenAI's API
MAX_PARTIAL_PICTURES = 3
MAX_SEED = 2**63 - 1
SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
# Steps of a quality, relative to `serve.pictures.steps`. 'standard' and 'hd' are the names of older models.
QUALITIES = {"low": 0.5, "medium": 1.0, "high": 2.0, "xhigh": 3.0, "max": 4.0}
ALIASES = {"auto": "medium", "standard": "medium", "hd": "high"}
FORMATS = ("png", "jpeg", "webp")

Prompt = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
# Parameters of OpenAI's API that would change the answer and that a diffusion model does not have.
UNSUPPORTED = {
    "style": "describe the style in the prompt",
    "complexity": "set 'quality' or 'steps'",
    "frame_count": "the model makes still pictures",
    "frame_duration_ms": "the model makes still pictures",
    "svg": "the model makes pixels",
}


class PictureRequest(BaseModel):
    """Body of a request. `background`, `moderation` and the notes have no effect beyond their check."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    prompt: Prompt
    model: str | None = None
    n: int | None = None
    size: str | None = None
    quality: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    output_compression: int | None = None
    background: Literal["opaque", "auto"] | None = None
    moderation: Literal["low", "auto"] | None = None
    stream: bool | None = None
    partial_images: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    negative_prompt: Prompt | None = None
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    progress: bool | None = None


@dataclass(frozen=True)
class PictureModel:
    """Sizes that a loaded model can make. `multiple`: of both sides; `largest`: of each side, None without a limit."""

    width: int
    height: int
    multiple: int
    largest: int | None = None


@dataclass(frozen=True)
class Order:
    """A checked request, with every default filled in."""

    prompt: str
    negative: str
    count: int
    width: int
    height: int
    steps: int
    guidance: float
    seed: int  # of the first picture; the next ones follow
    quality: str
    format: str
    compression: int
    stream: bool
    partials: int
    progress: bool
    user: str | None

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"


def order(tree: dict[str, Any], model: PictureModel, section: PictureServingSection) -> Order:
    """Checks a parsed request. Raises a 400 that names the parameter."""
    for name in UNSUPPORTED.keys() & tree.keys():
        if tree[name] is not None:
            raise ApiError(400, f"'{name}' is not supported: {UNSUPPORTED[name]}.", param=name)
    request = validate(tree, PictureRequest)
    if not request.prompt.strip():
        raise ApiError(400, "'prompt' must not be empty.", param="prompt")
    width, height = _size(request.size, model, section)
    quality = _quality(request.quality)
    format_, compression = _format(request)
    streams = bool(request.stream)
    if request.partial_images and not streams:
        raise ApiError(400, "'partial_images' needs 'stream': true.", param="partial_images")
    if request.progress and not streams:
        raise ApiError(400, "'progress' needs 'stream': true.", param="progress")
    count = _between("n", request.n, 1, section.max_pictures, 1)
    steps = max(1, min(section.max_steps, round(section.steps * QUALITIES[quality])))
    guidance = section.guidance if request.guidance is None else request.guidance
    if not 0 <= guidance <= 100:  # NaN is neither
        raise ApiError(400, "'guidance' must be between 0 and 100.", param="guidance")
    return Order(
        prompt=request.prompt,
        negative=request.negative_prompt or "",
        count=count,
        width=width,
        height=height,
        steps=_between("steps", request.steps, 1, section.max_steps, steps),
        guidance=guidance,
        seed=_between("seed", request.seed, 0, MAX_SEED - count, secrets.randbelow(2**32)),
        quality=quality,
        format=format_,
        compression=compression,
        stream=streams,
        partials=_between("partial_images", request.partial_images, 0, MAX_PARTIAL_PICTURES, 0),
        progress=bool(request.progress),
        user=request.safety_identifier or request.user or None,
    )


def _between(name: str, value: int | None, least: int, most: int, default: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise ApiError(400, f"'{name}' must be between {least} and {most}.", param=name)
    return value


def _size(size: str | None, model: PictureModel, section: PictureServingSection) -> tuple[int, int]:
    if size is None or size == "auto":
        return model.width, model.height
    found = SIZE.fullmatch(size)
    if found is None:
        raise ApiError(400, f"'size' must be 'auto' or WIDTHxHEIGHT, such as '{model.width}x{model.height}'.", param="size")
    width, height = int(found[1]), int(found[2])
    if width % model.multiple or height % model.multiple:
        raise ApiError(400, f"'size': width and height must be multiples of {model.multiple}.", param="size")
    if model.largest is not None and max(width, height) > model.largest:
        raise ApiError(400, f"'size': this model makes at most {model.largest} pixels in width and height.", param="size")
    if width * height > section.max_pixels:
        raise ApiError(400, f"'size': a picture may have at most {section.max_pixels} pixels.", param="size")
    return width, height


def _quality(quality: str | None) -> str:
    name = ALIASES.get(quality or "auto", quality or "auto")
    if name not in QUALITIES:
        raise ApiError(400, f"'quality' must be one of {', '.join((*QUALITIES, *ALIASES))}.", param="quality")
    return name


def _format(request: PictureRequest) -> tuple[str, int]:
    if request.response_format not in (None, "b64_json"):
        message = "'response_format' must be b64_json: pictures are not stored, so there is no url."
        raise ApiError(400, message, param="response_format")
    chosen = request.output_format or "png"
    if chosen not in FORMATS:
        raise ApiError(400, f"'output_format' must be one of {', '.join(FORMATS)}.", param="output_format")
    compression = _between("output_compression", request.output_compression, 0, 100, 100)
    if chosen == "png" and compression != 100:
        message = "'output_compression' needs output_format jpeg or webp: a png has no loss."
        raise ApiError(400, message, param="output_compression")
    return chosen, compression
