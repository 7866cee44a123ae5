"""Parses and validates client requests, with errors in OpenAI's format. Nothing here calls an engine.

The gateway calls `parse`, the decode replica `validate`. Between the two a request is plain data of bounded size and depth.
"""

import difflib
import re
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

MAX_BODY_BYTES = 16 * 2**20
MAX_DEPTH = 64  # xgrammar's parse time grows with the cube of a schema's depth: 60 levels need 0.1 s, 300 need 8 s
MAX_VALUES = 2**20  # commas: a prompt of a million token ids
MAX_BRACKETS = 2**17  # and colons, including those in text (code has 3 in 100 characters). Parsing this many needs 0.2 s
# Entries of one object or list that is not a prompt of token ids, and of all together. pydantic builds an error for each wrong
# entry: a list of 100,000 wrong entries needs 5 s.
MAX_ENTRIES = 4096
MAX_CONTAINERS = 2**14
MAX_MESSAGE = 1000  # characters of an error: pydantic and vLLM quote values of any size
INT64 = range(-(2**63), 2**63)

# vLLM passes these from the body to its connectors unchecked: with them a client could name another request's blocks,
# or crash a decode engine (CVE-2026-94622). They are refused at every level, `vllm_xargs` included.
FORBIDDEN = frozenset({"kv_transfer_params", "ec_transfer_params"})

# Parameters of OpenAI's API and of vLLM that have no effect here. Silently ignoring one would produce a wrong answer.
UNSUPPORTED = {
    "prompt_embeds": "send text or token ids as 'prompt'",
    "chat_template": "the model's own template is used",
    "media_io_kwargs": "images are read as the model's own configuration says",
    "mm_processor_kwargs": "images are read as the model's own configuration says",
    "vllm_xargs": "no extension reads it",
    "priority": "requests are served in the order of their arrival",
    "request_id": "send the header 'x-request-id'",
    "suffix": "the model continues text, it does not fill in",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "modalities": "the model generates only text",
    "audio": "the model generates only text",
    "prediction": "the model has no use for it",
    "web_search_options": "the model has no tools of its own",
    "verbosity": "the model has no such setting",
    "store": "nothing is stored",
    "return_token_offsets": "no answer has them",
    "return_assistant_tokens_mask": "no answer has it",
    "routed_experts_prompt_start": "no answer has routed experts",
}
NO_EFFECT = {"modalities": ["text"]}
# Parameters of OpenAI's API that only annotate a request.
NOTES = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
SERVICE_TIERS = ("auto", "default")
NAMED_ELSEWHERE = NOTES | UNSUPPORTED.keys() | {"best_of", "service_tier"}
ROLES = ("system", "developer", "user", "assistant", "tool")

# Error types by status. Other statuses are the client's fault below 500 and the server's above.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
MEDIA_KEYS = frozenset(
    {
        *("image_url", "video_url", "audio_url", "input_audio", "input_image", "image_pil", "uuid"),
        *("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
    }
)

# Up to the next bracket outside of strings. Possessive, and never without a match: linear in the text.
TO_BRACKET = re.compile(r"""(?:[^][{}"]++|"(?:[^"\\]++|\\.?)*+"?)*+([][{}]?)""", re.DOTALL)

AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


class ApiError(Exception):
    """Error response in OpenAI's format. Every route reports errors with it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = {"error": {"message": message, "type": error_type(status), "param": param and param[:100], "code": status}}


def error_type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def parse(body: bytes) -> dict[str, Any]:
    """Parses the body. msgspec is stricter than Python's parser: no NaN, no lone surrogates, only UTF-8."""
    if body.count(b",") >= MAX_VALUES or body.count(b"[") + body.count(b"{") + body.count(b":") > MAX_BRACKETS:
        raise ApiError(400, f"The JSON of the request has more than {MAX_VALUES} values or {MAX_BRACKETS} lists and keys.")
    try:
        tree = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, f"The JSON of the request is nested deeper than {MAX_DEPTH} levels.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The request is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ApiError(400, "The request must be a JSON object.")
    _walk(tree)
    _refuse_ignored(tree)
    return tree


def validate(tree: dict[str, Any], model: type[AnyRequest], early: Callable[[dict[str, Any]], None] | None = None) -> AnyRequest:
    """`early` refuses what vLLM would act on during validation; by default, for completions and chat."""
    (early or refuse_early)(tree)
    try:
        checked = model.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{where}: {first['msg']}" if where else str(first["msg"]), param=where or None) from None
    except Exception as error:
        # vLLM's own validators run before pydantic's. They raise vLLM's errors, and any error on values of a wrong type.
        reason = error.args[0] if error.args else error  # without the parameter and the value, which vLLM's errors append
        raise ApiError(400, f"The request is not valid: {reason}", param=getattr(error, "parameter", None)) from None
    if checked.model_extra:
        _refuse_unknown(checked.model_extra, model)
        checked.model_extra.clear()  # else unknown parameters would be readable as attributes
    if "request_id" in model.model_fields:
        # Engines identify requests by this id, so a client must not choose it.
        checked.request_id = uuid.uuid4().hex  # type: ignore[attr-defined]
    return checked


def _walk(tree: dict[str, Any]) -> None:
    """Checks every level of the request, without recursion: the client chooses the depth."""
    level: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    seen = 0
    for _ in range(MAX_DEPTH):
        below: list[tuple[tuple[str, ...], Any]] = []
        for path, node in level:
            if isinstance(node, dict) and (found := FORBIDDEN & node.keys()):
                raise ApiError(
                    400, f"'{min(found)}' can only be set by the server; remove it from the request.", param=min(found)
                )
            if _token_ids(path, node):
                if max(node) not in INT64:
                    raise _too_large(path[0])
                continue
            if len(node) > MAX_ENTRIES:
                where = f"'{path[0]}'" if path else "The request"
                message = f"{where} has {len(node)} entries; {MAX_ENTRIES} are allowed."
                raise ApiError(400, message, param=path[0] if path else None)
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                if isinstance(value, dict | list):
                    below.append(((*path, str(key)), value))
                elif isinstance(value, int) and value not in INT64:
                    raise _too_large(path[0] if path else str(key))
        if not below:
            return
        seen += len(below)
        if seen > MAX_CONTAINERS:
            raise ApiError(400, f"The JSON of the request has more than {MAX_CONTAINERS} lists and objects.")
        level = below
    raise ApiError(400, f"The JSON of the request is nested deeper than {MAX_DEPTH} levels.")


def _refuse_ignored(tree: dict[str, Any]) -> None:
    for key in UNSUPPORTED.keys() & tree.keys():
        if tree[key] and tree[key] != NO_EFFECT.get(key):
            raise ApiError(400, f"'{key}' is not supported: {UNSUPPORTED[key]}.", param=key)
    if (best_of := tree.get("best_of")) is not None and best_of != (tree.get("n") or 1):
        raise ApiError(
            400, "'best_of' is not supported: every sequence is returned, so it can only be equal to 'n'.", param="best_of"
        )
    if (tier := tree.get("service_tier")) is not None and tier not in SERVICE_TIERS:
        raise ApiError(400, f"'service_tier' may be {' or '.join(SERVICE_TIERS)}: there is one tier.", param="service_tier")


def _refuse_unknown(extra: dict[str, Any], model: type[BaseModel]) -> None:
    """Refuses unknown parameters, most of which are misspelt. OpenAI's API refuses them too."""
    for name in sorted(name for name, value in extra.items() if value is not None and name not in NAMED_ELSEWHERE):
        alike = difflib.get_close_matches(name[:50], model.model_fields, 1)
        hint = f" Did you mean '{alike[0]}'?" if alike else ""
        raise ApiError(400, f"There is no parameter '{name[:50]}'.{hint}", param=name)


def _token_ids(path: tuple[str, ...], node: Any) -> bool:
    """True if `node` is a prompt of token ids. The list may be long, so it is checked as a whole, not entry by entry."""
    if not (path == ("tokens",) or (path[:1] == ("prompt",) and len(path) <= 2)):
        return False
    return isinstance(node, list) and set(map(type, node)) == {int} and min(node) >= 0


def _too_large(where: str) -> ApiError:
    return ApiError(400, f"'{where}' has a number beyond 64 bits.", param=where)


def refuse_early(tree: dict[str, Any], parts: tuple[str, ...] = ()) -> None:
    """Refuses parameters that vLLM would act on during validation. It makes message contents iterators that can be read only
    once. `parts`: types of content that the model accepts besides text."""
    refuse_structural_tag(tree)
    for message in dicts(tree.get("messages")):
        if (role := message.get("role")) not in ROLES:
            raise ApiError(400, f"'role' must be one of {', '.join(ROLES)}, not {str(role)[:50]!r}.", param="messages")
        for part in dicts(message.get("content")):
            kind = part.get("type", "text")
            if kind not in TEXT_PARTS + parts:
                accepted = " and ".join(("text", *parts))
                message_text = f"The model accepts only {accepted}: content of type '{str(kind)[:50]}' is not supported."
                raise ApiError(400, message_text, param="messages")
            if kind in TEXT_PARTS and (media := MEDIA_KEYS & part.keys()):  # vLLM would read them in a part without a type
                raise ApiError(400, f"A part of type 'text' has no '{min(media)}'.", param="messages")
        for call in dicts(message.get("tool_calls")):
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str) and nesting(arguments) > MAX_DEPTH:
                raise ApiError(400, f"The arguments of a tool call are nested deeper than {MAX_DEPTH} levels.", param="messages")


def refuse_structural_tag(tree: dict[str, Any]) -> None:
    """vLLM passes a structural tag to xgrammar in this process during validation, and xgrammar can crash (see
    `grammar_trial.py`)."""
    wanted, structured = tree.get("response_format"), tree.get("structured_outputs")
    if isinstance(wanted, dict) and wanted.get("type") == "structural_tag":
        raise ApiError(400, "'response_format' may be of type text, json_object or json_schema.", param="response_format")
    if isinstance(structured, dict) and structured.get("structural_tag") is not None:
        allowed = "json, json_object, regex, choice or grammar"
        raise ApiError(400, f"'structured_outputs' may have {allowed}.", param="structured_outputs")


def dicts(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def nesting(text: str) -> int:
    """Nesting depth of JSON in a string, which vLLM parses recursively. Brackets within its strings do not count: with closing
    ones there, a client could hide the depth. Ends at the first bracket that closes nothing, as a parser does."""
    depth = deepest = 0
    for found in TO_BRACKET.finditer(text):
        bracket = found[1]
        if not bracket or (depth := depth + (1 if bracket in "[{" else -1)) < 0:
            break
        deepest = max(deepest, depth)
    return deepest
