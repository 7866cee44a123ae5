"""Parsing and limits of requests for pictures."""

import math
from typing import Any

import pytest

from strata.platform.recipe import PictureServingSection
from strata.serving.api.pictures import Order, PictureModel, order
from strata.serving.api.requests import ApiError

MODEL = PictureModel(width=32, height=48, multiple=4, largest=64)
SECTION = PictureServingSection(steps=20, max_steps=60, max_pictures=4, guidance=3.5, max_pixels=48 * 64)


def parsed(**body: Any) -> Order:
    return order({"prompt": "a red circle"} | body, MODEL, SECTION)


def test_defaults_are_the_models_and_the_recipes() -> None:
    made = parsed()
    assert (made.width, made.height, made.steps, made.guidance, made.count) == (32, 48, 20, 3.5, 1)
    assert (made.format, made.compression, made.quality, made.stream, made.partials) == ("png", 100, "medium", False, 0)
    assert made.negative == "" and made.user is None and not made.progress and made.size == "32x48"


def test_requests_without_a_seed_differ() -> None:
    assert len({parsed().seed for _ in range(8)}) > 1


def test_null_is_the_default() -> None:
    nulls = dict.fromkeys(("n", "size", "quality", "steps", "guidance", "output_format", "stream", "partial_images", "user"))
    assert parsed(seed=1, **nulls) == parsed(seed=1)


@pytest.mark.parametrize(
    ("quality", "steps", "reported"),
    [("low", 10, "low"), ("medium", 20, "medium"), ("auto", 20, "medium"), ("standard", 20, "medium"), ("high", 40, "high"),
     ("hd", 40, "high"), ("xhigh", 60, "xhigh"), ("max", 60, "max")],
)  # fmt: skip
def test_quality_is_a_number_of_steps_up_to_the_most(quality: str, steps: int, reported: str) -> None:
    made = parsed(quality=quality)
    assert (made.steps, made.quality) == (steps, reported)
    assert parsed(quality=quality, steps=7).steps == 7  # named steps win


@pytest.mark.parametrize(("size", "wanted"), [("auto", (32, 48)), ("4x4", (4, 4)), ("64x48", (64, 48)), ("48x64", (48, 64))])
def test_sizes(size: str, wanted: tuple[int, int]) -> None:
    made = parsed(size=size)
    assert (made.width, made.height) == wanted


def test_own_fields_and_notes_are_read() -> None:
    made = parsed(
        negative_prompt="blue", seed=5, steps=3, guidance=7, stream=True, partial_images=3, progress=True, n=4, user="u"
    )
    assert (made.negative, made.seed, made.steps, made.guidance, made.partials) == ("blue", 5, 3, 7.0, 3)
    assert made.stream and made.progress and made.count == 4 and made.user == "u"
    assert parsed(user="u", safety_identifier="s").user == "s"
    assert parsed(response_format="b64_json", background="opaque", moderation="low", model="tiny").count == 1


@pytest.mark.parametrize("format_", ["jpeg", "webp"])
def test_compression_of_lossy_formats(format_: str) -> None:
    assert parsed(output_format=format_, output_compression=0).compression == 0
    assert parsed(output_format=format_).compression == 100


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": " \n\t"}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 7}),
    ("prompt", {"prompt": ["a", "b"]}),
    ("prompt", {"prompt": "x" * 32_001}),
    ("negative_prompt", {"negative_prompt": "x" * 32_001}),
    ("n", {"n": 0}),
    ("n", {"n": -1}),
    ("n", {"n": 5}),
    ("n", {"n": 1.5}),
    ("n", {"n": "2"}),
    ("n", {"n": True}),
    ("size", {"size": "33x32"}),
    ("size", {"size": "32x33"}),
    ("size", {"size": "68x4"}),
    ("size", {"size": "4x68"}),
    ("size", {"size": "64x52"}),
    ("size", {"size": "0x32"}),
    ("size", {"size": "-32x32"}),
    ("size", {"size": "32"}),
    ("size", {"size": "32x32x32"}),
    ("size", {"size": "32X32"}),
    ("size", {"size": " 32x32"}),
    ("size", {"size": "32x32\n"}),
    ("size", {"size": "٣٢x٣٢"}),
    ("size", {"size": "1e2x32"}),
    ("size", {"size": "99999999999x4"}),
    ("size", {"size": [32, 32]}),
    ("quality", {"quality": "best"}),
    ("quality", {"quality": 3}),
    ("response_format", {"response_format": "url"}),
    ("output_format", {"output_format": "gif"}),
    ("output_format", {"output_format": "../../etc"}),
    ("output_compression", {"output_compression": 50}),
    ("output_compression", {"output_format": "jpeg", "output_compression": 101}),
    ("output_compression", {"output_format": "jpeg", "output_compression": -1}),
    ("background", {"background": "transparent"}),
    ("moderation", {"moderation": "off"}),
    ("style", {"style": "vivid"}),
    ("svg", {"svg": {"model": "x"}}),
    ("frame_count", {"frame_count": 4}),
    ("partial_images", {"partial_images": 1}),
    ("partial_images", {"stream": True, "partial_images": 4}),
    ("partial_images", {"stream": True, "partial_images": -1}),
    ("progress", {"progress": True}),
    ("stream", {"stream": "yes"}),
    ("steps", {"steps": 0}),
    ("steps", {"steps": 61}),
    ("steps", {"steps": 10**12}),
    ("guidance", {"guidance": -0.1}),
    ("guidance", {"guidance": 100.5}),
    ("guidance", {"guidance": math.nan}),
    ("guidance", {"guidance": math.inf}),
    ("guidance", {"guidance": "4"}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**63 - 1}),
    ("seed", {"seed": 1.0}),
    ("stepz", {"stepz": 4}),
]


@pytest.mark.parametrize(("param", "body"), HOSTILE, ids=lambda value: str(value)[:40])
def test_bad_values_are_refused_with_their_parameter(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**body)
    assert refused.value.status == 400 and refused.value.body["error"]["param"] == param
    assert len(refused.value.body["error"]["message"]) < 1100


def test_misspelt_parameter_is_corrected() -> None:
    with pytest.raises(ApiError, match="Did you mean 'guidance'"):
        parsed(guidence=4)


def test_seeds_of_all_pictures_fit() -> None:
    assert parsed(seed=2**63 - 1 - 4, n=4).seed == 2**63 - 5
