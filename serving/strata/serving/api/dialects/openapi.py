"""OpenAPI document of a text endpoint with all of its APIs."""

from collections.abc import Sequence
from typing import Any

from strata.serving.api import openapi
from strata.serving.api.dialects import batches, errors, messages, responses
from strata.serving.api.dialects.pooling import MAX_INPUTS
from strata.serving.api.limits import MAX_STOP_CHARACTERS
from strata.serving.api.requests import MAX_ENTRIES

Schema = dict[str, Any]


def document(models: Sequence[str]) -> Schema:
    text = openapi.document(models)
    model = {"type": ["string", "null"], "enum": [*models, None], "default": models[0]}
    named = {"model": model}
    text["paths"] |= {
        "/v1/responses": {"post": openapi.post("createResponse", "OpenAI's responses.", "ResponseRequest", "Response", True)},
        "/v1/messages": {"post": _anthropic("createMessage", "Anthropic's messages.", "MessageRequest", "Message", True)},
        "/v1/messages/count_tokens": {
            "post": _anthropic("countTokens", "Tokens of a conversation.", "CountRequest", "Count", False)
        },
    }
    text["paths"] |= batches.paths()
    for route, (name, summary) in _POOLING.items():
        request, answer = f"{name}Request", f"{name}s"
        text["paths"][route] = {"post": openapi.post(f"create{name}", summary, request, answer)}
    text["components"]["schemas"] |= {
        "EmbeddingRequest": openapi.request(named | {"input": _INPUT, "encoding_format": {"enum": ["float", "base64"]}}, "input"),
        "ScoreRequest": openapi.request(named | {"text_1": _TEXTS, "text_2": _TEXTS}, "text_1", "text_2"),
        "RankingRequest": openapi.request(
            named | {"query": {"type": "string"}, "documents": _TEXTS, "top_n": {"type": "integer", "minimum": 0}},
            *("query", "documents"),
        ),
        "Embeddings": _object({"data": {"type": "array"}, "usage": {"type": "object"}}, "data", "usage"),
        "Scores": _object({"data": {"type": "array"}, "usage": {"type": "object"}}, "data", "usage"),
        "Rankings": _object({"results": {"type": "array"}, "usage": {"type": "object"}}, "results", "usage"),
        "ResponseRequest": openapi.request(named | _RESPONSE, "input"),
        "MessageRequest": openapi.request(named | _CONVERSATION | _MESSAGE, "messages", "max_tokens"),
        "CountRequest": openapi.request(named | _CONVERSATION, "messages"),
        **_ANSWERS,
        **batches.schemas(),
    }
    return text


def _anthropic(name: str, summary: str, request: str, answer: str, streams: bool) -> Schema:
    route = openapi.post(name, summary, request, answer, streams)
    for status, response in route["responses"].items():
        if status != "200":
            response["content"]["application/json"]["schema"] = {"$ref": "#/components/schemas/AnthropicError"}
    return route


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(of: Schema, least: int = 0, most: int = MAX_ENTRIES) -> Schema:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most}


def _number(least: float, most: float) -> Schema:
    return {"type": ["number", "null"], "minimum": least, "maximum": most}


def _parts(*kinds: str) -> Schema:
    part = _object({"type": {"enum": list(kinds)}, "text": {"type": "string"}}, "type", "text")
    return {"oneOf": [{"type": "string"}, _list(part, 1)]}


_BOOL: Schema = {"type": "boolean"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[a-zA-Z0-9_-]+$"}
_COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_STOP: Schema = _list({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}, most=4)

_RESPONSE: Schema = {
    "input": {
        "oneOf": [
            {"type": "string", "minLength": 1},
            _list(_object({"role": {"enum": list(responses.ROLES)}, "content": {"type": "string"}}, "role", "content"), 1),
        ],
        "description": "The whole conversation: nothing is stored.",
    },
    "instructions": {"type": ["string", "null"]},
    "max_output_tokens": _COUNT,
    "temperature": _number(0, 2),
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    "include": _list({"enum": list(responses.INCLUDED)}, most=2),
    "tools": _list(
        _object({"type": {"const": "function"}, "name": _NAME, "parameters": {"type": "object"}}, "type", "name", "parameters")
    ),
    "tool_choice": {"enum": list(responses.CHOICES), "description": "Or an object with the name of a function."},
    "text": _object({"format": _object({"type": {"enum": ["text", "json_object", "json_schema"]}}, "type")}),
    "truncation": {"enum": ["auto", "disabled", None]},
    "stream": _BOOL,
    "store": {"enum": [False, None], "description": "Nothing is stored."},
    "user": {"type": ["string", "null"]},
    "metadata": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
}
_CONVERSATION: Schema = {
    "messages": _list(_object({"role": {"enum": list(messages.ROLES)}, "content": _parts("text")}, "role", "content"), 1),
    "system": _parts("text"),
    "tools": _list(
        _object({"name": _NAME, "description": {"type": "string"}, "input_schema": {"type": "object"}}, "name", "input_schema")
    ),
    "tool_choice": _object({"type": {"enum": ["auto", "any", "tool", "none"]}, "name": _NAME}, "type"),
}
_MESSAGE: Schema = {
    "max_tokens": _COUNT,
    "stop_sequences": _STOP,
    "stream": _BOOL,
    "temperature": _number(0, 2),
    "top_k": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**31 - 1},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "metadata": {"type": ["object", "null"]},
}
_POOLING = {
    "/v1/embeddings": ("Embedding", "Vectors of texts, if the model makes them."),
    "/v1/score": ("Score", "Scores of pairs of texts, if the model makes them."),
    "/v1/rerank": ("Ranking", "Documents by their relevance for a query, if the model scores them."),
}
_TEXTS: Schema = {"oneOf": [{"type": "string", "minLength": 1}, _list({"type": "string", "minLength": 1}, 1, MAX_INPUTS)]}
_INPUT: Schema = {"oneOf": [*_TEXTS["oneOf"], _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, 1)]}
_TEXT: Schema = {"type": "string"}
_USAGE = _object({"input_tokens": {"type": "integer"}, "output_tokens": {"type": "integer"}}, "input_tokens", "output_tokens")
_TYPES = sorted({*errors.TYPES.values(), "invalid_request_error", "api_error"})
_ANSWERS: Schema = {
    "Response": _object(
        {"id": _TEXT, "object": {"const": "response"}, "status": _TEXT, "model": _TEXT, "output": {"type": "array"}},
        *("id", "object", "status", "model", "output"),
    ),
    "Message": _object(
        {"id": _TEXT, "type": {"const": "message"}, "content": {"type": "array"}, "stop_reason": _TEXT, "usage": _USAGE},
        *("id", "type", "content", "stop_reason", "usage"),
    ),
    "Count": _object({"input_tokens": {"type": "integer"}}, "input_tokens"),
    "AnthropicError": _object(
        {"type": {"const": "error"}, "error": _object({"type": {"enum": _TYPES}, "message": _TEXT}, "type", "message")},
        *("type", "error"),
    ),
}
