"""Answers of `POST /v1/images/generations` in OpenAI's format: the whole answer, and the events of a stream.

`image_generation.partial_image` and `image_generation.completed` are OpenAI's. `image_generation.progress` is Strata's and sent
only if the request has `"progress": true`: the official client reads an unknown event as a partial picture without data.
"""

import base64
import io
import json
import math
from typing import Any

import numpy as np
from PIL import Image

from strata.serving.api.pictures import Order, PictureModel

PARTIAL = "image_generation.partial_image"
COMPLETED = "image_generation.completed"
PROGRESS = "image_generation.progress"


def encode(picture: np.ndarray, order: Order) -> str:
    """The picture, uint8 [height, width, 3], as a file of the wanted format, in base64."""
    file = io.BytesIO()
    quality = {} if order.format == "png" else {"quality": max(1, order.compression)}
    Image.fromarray(picture).save(file, order.format, **quality)
    return base64.b64encode(file.getvalue()).decode()


def partial_steps(steps: int, partials: int) -> list[int]:
    """Steps after which a partial picture is sent: spread evenly, the last step excluded. Fewer if there are fewer steps."""
    return sorted({math.floor(steps * (number + 1) / (partials + 1)) for number in range(partials)} - {0, steps})


def usage(order: Order, model: PictureModel, text_tokens: int, pictures: int) -> dict[str, Any]:
    """Tokens of the prompt, and of the pictures as the model counts them: one per patch."""
    picture_tokens = pictures * (order.width // model.multiple) * (order.height // model.multiple)
    return {
        "input_tokens": text_tokens,
        "input_tokens_details": {"text_tokens": text_tokens, "image_tokens": 0},
        "output_tokens": picture_tokens,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": picture_tokens},
        "total_tokens": text_tokens + picture_tokens,
    }


def answer(order: Order, created: int, pictures: list[str], used: dict[str, Any]) -> bytes:
    """The whole answer. Each picture has its seed beside OpenAI's fields."""
    tree = _about(order) | {
        "created": created,
        "data": [{"b64_json": data, "seed": order.seed + index} for index, data in enumerate(pictures)],
        "usage": used,
    }
    return json.dumps(tree).encode()


def partial(order: Order, created: int, index: int, number: int, data: str) -> str:
    """`index`: of the picture in its request; `number`: of the partial picture."""
    tree = {"b64_json": data, "created_at": created, "partial_image_index": number, "index": index}
    return _event(PARTIAL, tree | _about(order))


def completed(order: Order, created: int, index: int, data: str, used: dict[str, Any]) -> str:
    tree = {"b64_json": data, "created_at": created, "index": index, "seed": order.seed + index, "usage": used}
    return _event(COMPLETED, tree | _about(order))


def progress(order: Order, created: int, index: int, step: int) -> str:
    return _event(PROGRESS, {"created_at": created, "index": index, "step": step, "steps": order.steps})


def _about(order: Order) -> dict[str, Any]:
    tree = {"background": "opaque", "output_format": order.format, "quality": order.quality, "size": order.size}
    return tree | ({"safety_identifier": order.user} if order.user else {})


def _event(kind: str, tree: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | tree)}\n\n"
