"""The APIs of a text model on vLLM's serving classes: from a client's JSON to a request, and from an answer to bytes."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError

from strata.serving.api import images
from strata.serving.api.dialects import messages, responses
from strata.serving.api.requests import ApiError, refuse_early, validate
from strata.serving.engine.request_context import RequestContext


@dataclass(frozen=True)
class TextApi:
    read: Callable[[dict[str, Any]], Any]  # parsed JSON to the request that limits and grammars are checked on
    create: Callable[[Any], Awaitable[Any]]  # answer, events or vLLM's ErrorResponse
    dump: Callable[[Any, RequestContext], bytes]  # JSON of a whole answer
    event: Callable[[Any, RequestContext], str] | None = None  # text of an event; None: it is text already
    # Several events can belong to one output of the engine. They are sent together, so that a replica that continues the stream
    # can tell from the tokens which events were sent.
    several_events: bool = False
    id_prefix: str = ""


def text_apis(state: Any, engine: Any) -> dict[str, TextApi]:
    """APIs by the name of the gateway's call. Replaces the engine of vLLM's classes in `state`."""
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    response, message = state.openai_serving_responses, state.anthropic_serving_messages
    for serving in (completion, chat, response, message):
        serving.engine_client = engine
    sees = engine.model_config.is_multimodal_model
    return {
        "completions": TextApi(
            lambda tree: validate(tree, CompletionRequest), lambda request: completion.create_completion(request, None), _dump
        ),
        "chat": TextApi(
            lambda tree: validate(tree, ChatCompletionRequest, _check_images if sees else None),
            lambda request: chat.create_chat_completion(request, None),
            _dump,
        ),
        "responses": TextApi(
            _read_response,
            lambda request: response.create_responses(request, None),
            _dump_response,
            _response_event,
            several_events=True,
            id_prefix="resp_",
        ),
        "messages": TextApi(
            partial(read_messages, message),
            partial(_create_message, message),
            _dump_message,
            several_events=True,
        ),
    }


def _check_images(tree: dict[str, Any]) -> None:
    refuse_early(tree, (images.PART,))
    images.check(tree)


def _read_response(tree: dict[str, Any]) -> ResponsesRequest:
    responses.check(tree)
    for item in tree["input"] if isinstance(tree.get("input"), list) else ():
        # Ends with the first wrong one: an error for each of many would take seconds.
        validate({"input": [item]}, ResponsesRequest, lambda tree: None)
    return validate(tree, ResponsesRequest, lambda tree: None)


def read_messages(serving: Any, tree: dict[str, Any]) -> ChatCompletionRequest:
    """Chat request of vLLM for a request of Anthropic's API."""
    model = AnthropicMessagesRequest
    checked = validate(tree, model, lambda tree: messages.check(tree, model))
    return _as_chat(serving, checked)


async def count_tokens(serving: Any, tree: dict[str, Any]) -> Any:
    model = AnthropicCountTokensRequest
    checked = validate(tree, model, lambda tree: messages.check(tree, model))
    _as_chat(serving, checked)
    return await serving.count_tokens(checked)


def _as_chat(serving: Any, request: Any) -> ChatCompletionRequest:
    try:
        chat: ChatCompletionRequest = serving.to_chat_completion_request(
            request, merge_inline_system=serving._merge_inline_system
        )
        return chat
    except ValidationError as error:
        raise ApiError(400, f"The request is not valid: {error.errors(include_url=False)[0]['msg']}") from None
    except (VLLMValidationError, ValueError) as error:
        raise ApiError(400, f"The request is not valid: {error}") from None


async def _create_message(serving: Any, request: ChatCompletionRequest) -> Any:
    created = await serving.create_chat_completion(request, None)
    if isinstance(created, ErrorResponse):
        return created
    if isinstance(created, ChatCompletionResponse):
        return serving.messages_full_converter(created)
    return serving.message_stream_converter(created)


def _dump(answer: Any, context: RequestContext) -> bytes:
    return answer.model_dump_json().encode()  # type: ignore[no-any-return]


def _dump_message(answer: Any, context: RequestContext) -> bytes:
    tree = {"stop_reason": None, "stop_sequence": None} | answer.model_dump(mode="json", exclude_none=True)
    return json.dumps(tree).encode()


def _dump_response(answer: Any, context: RequestContext) -> bytes:
    tree = answer.model_dump(mode="json", by_alias=True)
    responses.finish(tree, context.request, context.created)
    return json.dumps(tree).encode()


def _response_event(event: Any, context: RequestContext) -> str:
    tree = event.model_dump(mode="json", by_alias=True)
    sequence, context.events = context.events, context.events + 1
    return responses.number(tree, sequence, context.request, context.created)
