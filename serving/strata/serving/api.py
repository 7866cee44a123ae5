"""The OpenAI API, on the decode replica itself: no ingress process in between, and no route that is not listed here.

(vLLM's own app has some forty more, several of which hand client data to the engine's connectors.)
"""

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray.serve.llm import LLMServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

from strata.serving import disaggregation, headers
from strata.serving.engine import count_prompt_tokens
from strata.serving.requests import ApiError, read


def build(server: LLMServer, prefill_pool: Any, model_id: str, context: int) -> FastAPI:
    app = FastAPI(title="Strata", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _server_error)
    card = {
        "id": model_id,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "strata",
        "max_model_len": context,
    }

    @app.get("/health")
    async def health() -> Response:
        await server.check_health()
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _require_model(name, model_id)
        return card

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(await read(request, CompletionRequest))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await read(request, ChatCompletionRequest)
        if not asked.messages:
            raise ApiError(400, "There must be at least one message.", param="messages")
        return await generate(asked)

    async def generate(request: Any) -> Response:
        _require_model(request.model, model_id)
        if disaggregation.obstacle(request) is None:
            _require_room(request, await count_prompt_tokens(server, request), context)
        answer = await disaggregation.run(server, prefill_pool, request)
        first = await anext(answer.chunks)
        first = first[0] if isinstance(first, list) else first
        named = {headers.PREFILL: answer.prefill.header(), headers.REQUEST_ID: request.request_id}
        if isinstance(first, ErrorResponse):
            return JSONResponse(first.model_dump(), status_code=first.error.code, headers=named)
        if isinstance(first, str):
            return StreamingResponse(_events(first, answer.chunks), media_type="text/event-stream", headers=named)
        return JSONResponse(first.model_dump(), headers=named)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _only(await server.tokenize(await _read_tokenize(request)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _only(await server.detokenize(await read(request, DetokenizeRequest)))

    return app


async def _read_tokenize(request: Request) -> TokenizeChatRequest | TokenizeCompletionRequest:
    chat = b'"messages"' in await request.body()
    return await read(request, TokenizeChatRequest if chat else TokenizeCompletionRequest)


async def _only(answers: AsyncIterator[Any]) -> Response:
    answer = await anext(answers)
    status = answer.error.code if isinstance(answer, ErrorResponse) else 200
    return JSONResponse(answer.model_dump(), status_code=status)


async def _events(first: str, chunks: AsyncIterator[Any]) -> AsyncIterator[str]:
    yield first
    async for chunk in chunks:
        for event in chunk if isinstance(chunk, list) else [chunk]:
            yield event if isinstance(event, str) else f"data: {event.model_dump_json()}\n\n"


def _require_model(name: str | None, model_id: str) -> None:
    if name is not None and name != model_id:
        raise ApiError(404, f"The model '{name}' does not exist; this endpoint serves '{model_id}'.", "not_found_error", "model")


def _require_room(request: Any, counted: int | ErrorResponse, context: int) -> None:
    """Before any prefill: a prompt refused only by the decode engine would leave its blocks behind on the prefill engine."""
    if isinstance(counted, ErrorResponse):
        raise ApiError(counted.error.code, counted.error.message)
    wanted = getattr(request, "max_completion_tokens", None) or request.max_tokens or 1
    if counted + wanted > context:
        raise ApiError(
            400,
            f"This model's context is {context} tokens, but {counted + wanted} were asked for: {counted} in the prompt and "
            f"{wanted} to generate. Shorten the prompt or lower max_tokens.",
            param="max_tokens" if counted < context else "prompt",
        )


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, status_code=error.status_code)


async def _server_error(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"The server failed: {error}", "internal_error").body, status_code=500)
