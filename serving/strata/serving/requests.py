"""From the bytes a client sent to a checked request, or a 4xx in OpenAI's error shape. Nothing here reaches an engine."""

import json
import uuid
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

MAX_BODY_BYTES = 16 * 2**20

# vLLM passes these from the body to its connectors unchecked: with them a client could name another request's blocks,
# or kill a decode engine (CVE-2026-94622). They are refused wherever they stand, `vllm_xargs` included.
FORBIDDEN = frozenset({"kv_transfer_params", "ec_transfer_params"})

AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


class ApiError(Exception):
    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def read(request: Request, model: type[AnyRequest]) -> AnyRequest:
    tree = _parse(await _body(request))
    if found := forbidden_key(tree):
        raise ApiError(400, f"'{found}' is set by the server alone; remove it from the request.", param=found)
    try:
        checked = model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{where}: {first['msg']}" if where else str(first["msg"]), param=where or None) from None
    except Exception as error:
        # vLLM's own validators run before pydantic's: they raise errors of vLLM's, and trip over values of a wrong type.
        # It is the client's data all the same.
        raise ApiError(400, f"The request is not valid: {error}") from None
    if "request_id" in model.model_fields:
        # The engines tell requests apart by this alone: a client must not choose another's.
        checked.request_id = uuid.uuid4().hex  # type: ignore[attr-defined]
    return checked


def forbidden_key(tree: Any) -> str | None:
    """Walks with a stack of its own: a client chooses how deep its JSON is."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if found := FORBIDDEN & node.keys():
                return min(found)
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return None


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"The request is larger than {MAX_BODY_BYTES // 2**20} MiB.")
    return bytes(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(body)
    except RecursionError:
        raise ApiError(400, "The JSON of the request is nested too deeply.") from None
    except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
        raise ApiError(400, f"The request is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ApiError(400, "The request must be a JSON object.")
    return tree
