"""OpenAPI document of an endpoint for pictures."""

from collections.abc import Sequence
from typing import Any

from strata.serving.api import openapi
from strata.serving.api.pictures import ALIASES, FORMATS, MAX_PARTIAL_PICTURES, MAX_PROMPT_CHARACTERS, QUALITIES

Schema = dict[str, Any]
ROUTE = "/v1/images/generations"
SHARED = ("/health", "/ready", "/metrics", "/-/state", "/openapi.json", "/v1/models", "/v1/models/{id}")


def document(models: Sequence[str]) -> Schema:
    """The routes that every endpoint has, and those of pictures."""
    text = openapi.document(models)
    model = {"type": ["string", "null"], "enum": [*models, None], "default": models[0]}
    schemas = text["components"]["schemas"]
    return text | {
        "paths": {path: text["paths"][path] for path in SHARED}
        | {
            ROUTE: {"post": openapi.post("createImage", "Pictures of a prompt.", "PictureRequest", "Pictures", True)},
            f"{ROUTE}/{{id}}": {
                "delete": openapi.get("cancelImage", "Ends the caller's requests with this x-request-id.", _CANCELLED),
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            },
        },
        "components": {
            "schemas": {
                **{name: schemas[name] for name in ("Error", "Model", "ModelList", "Ready", "State")},
                "PictureRequest": openapi.request({"model": model} | _REQUEST, "prompt"),
                "Pictures": _PICTURES,
            }
        },
    }


def _or_null(kind: str, **limits: Any) -> Schema:
    return {"type": [kind, "null"]} | limits


_PROMPT = {"maxLength": MAX_PROMPT_CHARACTERS}
_REQUEST = {
    "prompt": {"type": "string", "minLength": 1} | _PROMPT,
    "n": _or_null("integer", minimum=1, default=1),
    "size": _or_null("string", pattern="^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$", default="auto"),
    "quality": _or_null("string", enum=[*QUALITIES, *ALIASES, None], default="auto"),
    "response_format": _or_null("string", enum=["b64_json", None]),
    "output_format": _or_null("string", enum=[*FORMATS, None], default="png"),
    "output_compression": _or_null("integer", minimum=0, maximum=100, default=100),
    "background": _or_null("string", enum=["opaque", "auto", None]),
    "moderation": _or_null("string", enum=["low", "auto", None]),
    "stream": _or_null("boolean", default=False),
    "partial_images": _or_null("integer", minimum=0, maximum=MAX_PARTIAL_PICTURES),
    "user": _or_null("string"),
    "safety_identifier": _or_null("string"),
    "negative_prompt": _or_null("string", **_PROMPT),
    "seed": _or_null("integer", minimum=0),
    "steps": _or_null("integer", minimum=1),
    "guidance": _or_null("number", minimum=0, maximum=100),
    "progress": _or_null("boolean", default=False),
}
_INTEGER = {"type": "integer"}
_PICTURES = {
    "type": "object",
    "required": ["created", "data", "usage"],
    "properties": {
        "created": _INTEGER,
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["b64_json", "seed"],
                "properties": {"b64_json": {"type": "string"}, "seed": _INTEGER},
            },
        },
        "size": {"type": "string"},
        "quality": {"type": "string"},
        "output_format": {"type": "string"},
        "background": {"type": "string"},
        "usage": {
            "type": "object",
            "properties": {"input_tokens": _INTEGER, "output_tokens": _INTEGER, "total_tokens": _INTEGER},
        },
    },
}
_CANCELLED = {
    "description": "The requests were cancelled.",
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": {"id": {"type": "string"}, "cancelled": {"type": "boolean"}}}
        }
    },
}
