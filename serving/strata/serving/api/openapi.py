"""OpenAPI document of the endpoint, for client generators and for property-based tests.

It lists the tested parameters. vLLM's other parameters work too, within the limits of `limits.py`.
"""

from collections.abc import Sequence
from typing import Any

from strata.serving.api.limits import MAX_BAD_WORD_CHARACTERS, MAX_SEQUENCES, MAX_STOP_CHARACTERS
from strata.serving.api.requests import MAX_ENTRIES, MAX_VALUES, ROLES, SERVICE_TIERS, TYPES, error_type

Schema = dict[str, Any]

_ERRORS = {
    "400": "The request is not valid ('param' names the parameter), or it crashed engines.",
    "404": "No such route or model.",
    "405": "The route does not allow this method.",
    "408": "The request took too long to arrive.",
    "413": "The request is larger than 16 MiB.",
    "429": "Too many concurrent requests. Retry-After holds the seconds to wait.",
    "503": "No replica is ready. Retry-After holds the seconds to wait.",
}


def document(models: Sequence[str]) -> Schema:
    model = {"type": ["string", "null"], "enum": [*models, None], "default": models[0]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Strata", "version": "1", "description": f"OpenAI's API for the model '{models[0]}'."},
        "paths": {
            "/health": {"get": get("health", "Health of the endpoint.", {"description": "A healthy engine is up."})},
            "/ready": {"get": get("ready", "Readiness: every pool is up and warmed up.", _json(_ref("Ready")))},
            "/metrics": {"get": get("metrics", "Prometheus metrics.", _plain("The metrics."))},
            "/-/state": {"get": get("state", "Replicas with their load and queue, and running totals.", _json(_ref("State")))},
            "/openapi.json": {"get": get("openapi", "This document.", _json({"type": "object"}))},
            "/v1/models": {"get": get("listModels", "Served models.", _json(_ref("ModelList")))},
            "/v1/models/{id}": {
                "get": get("retrieveModel", "The model.", _json(_ref("Model"))),
                "parameters": [
                    {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "enum": list(models)}}
                ],
            },
            "/v1/completions": {
                "post": post("createCompletion", "Text after a prompt.", "CompletionRequest", "Completion", True)
            },
            "/v1/chat/completions": {"post": post("createChatCompletion", "The next message.", "ChatRequest", "Chat", True)},
            "/tokenize": {"post": post("tokenize", "Text to token ids.", "TokenizeRequest", "Tokens")},
            "/detokenize": {"post": post("detokenize", "Token ids to text.", "DetokenizeRequest", "Text")},
        },
        "components": {
            "schemas": {
                "CompletionRequest": request({"model": model, "prompt": _PROMPT} | _COMPLETION | _SAMPLING, "prompt"),
                "ChatRequest": request({"model": model, "messages": _MESSAGES} | _CHAT | _SAMPLING, "messages"),
                "TokenizeRequest": request({"model": model, "prompt": {"type": "string"}, "add_special_tokens": _BOOL}, "prompt"),
                "DetokenizeRequest": request({"model": model, "tokens": _TOKEN_IDS}, "tokens"),
                **_ANSWERS,
            }
        },
    }


def get(name: str, summary: str, answer: Schema) -> Schema:
    return {"operationId": name, "summary": summary, "responses": {"200": answer} | _errors("404", "405", "503")}


def post(name: str, summary: str, request: str, answer: str, streams: bool = False) -> Schema:
    response = _json(_ref(answer))
    if streams:
        response["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": response} | _errors(*_ERRORS),
    }


def _errors(*statuses: str) -> Schema:
    return {status: _json(_ref("Error"), _ERRORS[status]) for status in statuses}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema, description: str = "The answer.") -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _plain(description: str) -> Schema:
    return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def request(properties: Schema, *required: str) -> Schema:
    """Object schema that refuses unknown parameters."""
    return _object(properties, *required) | {"additionalProperties": False}


def _number(least: float, most: float) -> Schema:
    return {"type": ["number", "null"], "minimum": least, "maximum": most}


def _integer(least: int, most: int = 2**63 - 1) -> Schema:
    return {"type": ["integer", "null"], "minimum": least, "maximum": most}


def _list(of: Schema, least: int = 0, most: int = MAX_ENTRIES) -> Schema:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most}


_BOOL: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKEN_IDS = _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, most=MAX_VALUES)
_PROMPT = {
    "description": "Text, token ids, or several of them.",
    "oneOf": [_TEXT, _TOKEN_IDS | {"minItems": 1}, _list(_TEXT, 1, MAX_SEQUENCES)],
}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STREAM_OPTIONS = _object({"include_usage": _BOOL}) | {"description": "Only with 'stream'."}
_JSON_SCHEMA = _object({"name": _TEXT, "schema": {"type": "object"}, "strict": _BOOL}, "name", "schema")

_SAMPLING: Schema = {
    "max_tokens": _integer(1) | {"description": "Prompt and answer together must fit the model's context."},
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_SEQUENCES, "description": "Values above 1 need a temperature above 0."},
    "temperature": _number(0, 2),
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _integer(0),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "seed": _integer(-(2**63)),
    "stop": {"oneOf": [_STOP, _list(_STOP, most=4), {"type": "null"}]},
    "stop_token_ids": _list({"type": "integer", "minimum": 0}),
    "bad_words": _list(_TEXT, most=128) | {"description": f"At most {MAX_BAD_WORD_CHARACTERS} characters in total."},
    "min_tokens": {"type": "integer", "minimum": 0, "description": "At most 'max_tokens'."},
    "ignore_eos": _BOOL,
    "logit_bias": {
        "type": ["object", "null"],
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "propertyNames": {"pattern": "^[0-9]+$"},
    },
    "prompt_logprobs": _integer(0, 20),
    "stream": _BOOL,
    "stream_options": _STREAM_OPTIONS,
    "return_token_ids": _BOOL,
    "response_format": {
        "oneOf": [
            _object({"type": {"const": "text"}}, "type"),
            _object({"type": {"const": "json_object"}}, "type"),
            _object({"type": {"const": "json_schema"}, "json_schema": _JSON_SCHEMA}, "type", "json_schema"),
        ]
    },
    "structured_outputs": {
        "oneOf": [
            _object({"json": {"type": "object"}}, "json"),
            _object({"regex": _TEXT}, "regex"),
            _object({"choice": _list(_TEXT, 1)}, "choice"),
            _object({"grammar": _TEXT}, "grammar"),
        ],
        "description": "Instead of 'response_format'.",
    },
    "user": {"type": ["string", "null"], "description": "Has no effect."},
    "metadata": {"type": ["object", "null"], "description": "Has no effect."},
    "service_tier": {"enum": [*SERVICE_TIERS, None], "description": "There is one tier."},
}
_COMPLETION: Schema = {"logprobs": _integer(0, 20), "echo": _BOOL, "add_special_tokens": _BOOL}
_CALLS = _list(
    _object(
        {
            "id": _TEXT,
            "type": {"const": "function"},
            "function": _object({"name": _TEXT, "arguments": {"type": "string"}}, "name", "arguments"),
        },
        "id",
        "type",
        "function",
    )
)
_MESSAGES = _list(
    _object(
        {
            "role": {"type": "string", "enum": list(ROLES)},
            "content": {
                "oneOf": [
                    {"type": "string"},
                    _list(_object({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text")),
                ],
                "description": "A model that sees accepts parts of type 'image_url' too, with a data URL.",
            },
            "name": {"type": "string"},
            "tool_calls": _CALLS,
            "tool_call_id": {"type": "string"},
        },
        "role",
        "content",
    ),
    1,
)
_CHAT: Schema = {
    "max_completion_tokens": _integer(1),
    "logprobs": _BOOL,
    "top_logprobs": _integer(0, 20) | {"description": "Only with 'logprobs'."},
    "tools": _list(
        _object(
            {
                "type": {"const": "function"},
                "function": _object({"name": _TEXT, "description": {"type": "string"}, "parameters": {"type": "object"}}, "name"),
            },
            "type",
            "function",
        ),
        1,
    ),
    "tool_choice": {
        "oneOf": [
            {"type": "string", "enum": ["none", "auto", "required"]},
            _object({"type": {"const": "function"}, "function": _object({"name": _TEXT}, "name")}, "type", "function"),
        ]
    },
    "add_generation_prompt": _BOOL,
    "continue_final_message": _BOOL,
}

_MODEL = _object(
    {"id": _TEXT, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": _TEXT},
    "id",
    "object",
    "created",
    "owned_by",
)
_USAGE = _object(
    {"prompt_tokens": {"type": "integer"}, "completion_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
    "prompt_tokens",
    "total_tokens",
)
_ANSWERED = {"id": _TEXT, "created": {"type": "integer"}, "model": _TEXT, "usage": _USAGE}


def _answer(kind: str, **choice: Schema) -> Schema:
    properties = {"index": {"type": "integer"}, "finish_reason": {"type": ["string", "null"]}} | choice
    choices = {"type": "array", "items": _object(properties, *properties)}
    return _object(_ANSWERED | {"object": {"const": kind}, "choices": choices}, *_ANSWERED, "object", "choices")


_COUNT: Schema = {"type": "number", "minimum": 0}
_TOTALS = ("in_flight", "queued", "produced", "first_tokens", "first_token_seconds")
_REPLICA = _object(
    {
        "name": _TEXT,
        "model": _TEXT,
        "role": {"enum": ["decode", "prefill", "pictures"]},
        "healthy": _BOOL,
        "calls": _COUNT,
        "running": _COUNT,
        "waiting": _COUNT,
        "kv_usage": {"type": "number", "minimum": 0, "maximum": 1},
        "queued_tokens": _COUNT,
    },
    *("name", "model", "role", "healthy", "calls"),
)
_ANSWERS: Schema = {
    "Ready": _object({"status": {"const": "ready"}, "model": _TEXT}, "status", "model"),
    "State": _object(
        {
            "object": {"const": "state"},
            "kind": {"enum": ["text", "pictures"]},
            "models": _list(_TEXT, 1),
            "replicas": _list(_REPLICA),
            "gateways": {"type": "integer", "minimum": 1},
            "totals": _object(dict.fromkeys(_TOTALS, _COUNT), *_TOTALS),
        },
        *("object", "kind", "models", "replicas", "gateways", "totals"),
    ),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}, "object", "data"),
    "Completion": _answer("text_completion", text={"type": "string"}),
    "Chat": _answer("chat.completion", message=_object({"role": _TEXT, "content": {"type": ["string", "null"]}}, "role")),
    "Tokens": _object(
        {"count": {"type": "integer"}, "tokens": {"type": "array", "items": {"type": "integer"}}}, "count", "tokens"
    ),
    "Text": _object({"prompt": {"type": "string"}}, "prompt"),
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string"},
                    "type": {"type": "string", "enum": sorted({*TYPES.values(), error_type(400), error_type(500)})},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "integer"},
                },
                "message",
                "type",
                "param",
                "code",
            )
        },
        "error",
    ),
}
