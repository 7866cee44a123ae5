"""Images in chat messages: sent within the request, with a bounded size. Their number is limited by vLLM.

An endpoint fetches nothing from addresses that clients name: from inside its network it could reach what they cannot.
"""

import base64
import binascii
import io
import re
from typing import Any

from strata.serving.api.requests import ApiError, dicts

PART = "image_url"
MOST = 8  # images of one request, unless serve.engine.limit_mm_per_prompt sets another number
MAX_PIXELS = 2**24  # a small file can have many: decoded, each needs 3 bytes or more
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
DATA_URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,")


def check(tree: dict[str, Any]) -> None:
    """Raises a 400 for an image that must not reach vLLM."""
    for message in dicts(tree.get("messages")):
        for part in dicts(message.get("content")):
            if part.get("type") == PART:
                _check_part(part)


def _check_part(part: dict[str, Any]) -> None:
    source = part.get(PART)
    url = source.get("url") if isinstance(source, dict) else None
    # vLLM would read an image of an earlier request by its 'uuid', which may be that of another tenant.
    if not isinstance(url, str) or part.keys() - {"type", PART} or source.keys() - {"url", "detail"}:  # type: ignore[union-attr]
        raise _wrong("An image is {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}.")
    found = DATA_URL.match(url, 0, 64)
    if found is None:
        raise _wrong("The endpoint fetches no images: send them as a data URL, 'data:image/png;base64,...'.")
    try:
        content = base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("The data URL of an image is not valid base64.") from None
    width, height = _size(content)
    if width * height > MAX_PIXELS:
        raise _wrong(f"An image has {width} x {height} pixels; {MAX_PIXELS} are allowed.")


def _size(content: bytes) -> tuple[int, int]:
    """Width and height from the image's header. Nothing is decoded."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return image.size
    except Exception:  # Pillow's readers raise errors of many kinds on damaged files
        raise _wrong(f"An image must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, and complete.") from None


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
