"""Serializes server-sent events of plain text streams without building vLLM's response objects.

vLLM builds and serializes a tree of pydantic objects for every token: a third of the work of its front-end process under load.
Most streams carry only text, and their events differ in a few characters. This file formats them as strings, byte for byte
equal to vLLM's events. All other streams use vLLM's generators.

Written for vLLM 0.29. No longer needed when vLLM's stream generators do not call `model_dump_json` for every token; the test
of this file fails then, and also when the events differ.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.outputs import RequestOutput


def install(completion: OpenAIServingCompletion, chat: OpenAIServingChat) -> None:
    """Changes the classes of vLLM's serving objects, which vLLM constructs itself. The new classes add no state."""
    completion.__class__, chat.__class__ = FastCompletion, FastChat


class FastCompletion(OpenAIServingCompletion):  # type: ignore[misc]
    def completion_stream_generator(
        self,
        request: Any,
        engine_inputs: Any,
        result_generator: Any,
        request_id: str,
        created_time: int,
        model_name: str,
        **more: Any,
    ) -> AsyncIterator[str]:
        plain = more["num_prompts"] == 1 and request.logprobs is None and not request.echo
        if not (plain and _is_plain(self, request)):
            stock: AsyncIterator[str] = super().completion_stream_generator(
                request, engine_inputs, result_generator, request_id, created_time, model_name, **more
            )
            return stock
        usage, _ = should_include_usage(request.stream_options, self.enable_force_include_usage)
        return _completion(result_generator, request_id, created_time, model_name, usage, _fingerprint(self))


class FastChat(OpenAIServingChat):  # type: ignore[misc]
    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, request_id: str, model_name: str, *rest: Any, **more: Any
    ) -> AsyncIterator[str]:
        plain = self.parser_cls is None and not request.logprobs and not request.echo
        if not (plain and not request.return_prompt_text and _is_plain(self, request)):
            stock: AsyncIterator[str] = super().chat_completion_stream_generator(
                request, result_generator, request_id, model_name, *rest, **more
            )
            return stock
        usage, _ = should_include_usage(request.stream_options, self.enable_force_include_usage)
        role = self.get_chat_request_role(request)
        return _chat(result_generator, request_id, model_name, role, usage, _fingerprint(self))


def _is_plain(serving: Any, request: Any) -> bool:
    _, continuous = should_include_usage(request.stream_options, serving.enable_force_include_usage)
    return not (
        (request.n or 1) > 1
        or request.return_token_ids
        or continuous
        or serving.enable_prompt_tokens_details
        or serving.enable_per_request_metrics
    )


def _fingerprint(serving: Any) -> str:
    """Fingerprint field, which is part of the last event with content."""
    known = serving.system_fingerprint
    return "" if known is None else f',"system_fingerprint":{json.dumps(known)}'


async def _completion(
    outputs: AsyncIterator[tuple[int, RequestOutput]], request_id: str, created: int, model: str, usage: bool, fingerprint: str
) -> AsyncIterator[str]:
    prefix = f'{{"id":{json.dumps(request_id)},"object":"text_completion","created":{created},"model":{json.dumps(model)}'
    opening = f'data: {prefix},"choices":[{{"index":0,"text":'
    continuation = ',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
    prompt = generated = 0
    async for _, output in outputs:
        part = output.outputs[0]
        prompt = len(output.prompt_token_ids or ()) or prompt
        generated += len(part.token_ids)
        if part.finish_reason is None:
            if part.text or part.token_ids or generated:
                yield opening + json.dumps(part.text) + continuation
            continue
        reasons = f'"finish_reason":{json.dumps(part.finish_reason)},"stop_reason":{json.dumps(part.stop_reason)}'
        last = f'{json.dumps(part.text)},"logprobs":null,{reasons},"prompt_token_ids":null,"token_ids":null'
        yield f"{opening}{last}}}]{'' if usage else fingerprint}}}\n\n"
    if usage:
        counts = f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + generated},"completion_tokens":{generated}}}'
        yield f'data: {prefix},"choices":[],"usage":{counts}{fingerprint}}}\n\n'
    yield "data: [DONE]\n\n"


async def _chat(
    outputs: AsyncIterator[RequestOutput], request_id: str, model: str, role: str, usage: bool, fingerprint: str
) -> AsyncIterator[str]:
    prefix = f'{{"id":{json.dumps(request_id)},"object":"chat.completion.chunk","created":{int(time.time())}'
    prefix += f',"model":{json.dumps(model)}'
    opening = f'data: {prefix},"choices":[{{"index":0,"delta":{{'
    first_delta = '},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}\n\n'
    continuation = '},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
    prompt = generated = 0
    begun = False
    async for output in outputs:
        part = output.outputs[0]
        prompt = len(output.prompt_token_ids or ()) or prompt
        generated += len(part.token_ids)
        if not begun:
            begun = True
            yield f'{opening}"role":{json.dumps(role)},"content":""{first_delta}'
        if part.finish_reason is None:
            if part.text or part.token_ids or generated:
                yield f'{opening}"content":{json.dumps(part.text)}{continuation}'
            continue
        reasons = f'"finish_reason":{json.dumps(part.finish_reason)},"stop_reason":{json.dumps(part.stop_reason)}'
        last = f'"content":{json.dumps(part.text)}}},"logprobs":null,{reasons},"token_ids":null'
        yield f"{opening}{last}}}]{'' if usage else fingerprint}}}\n\n"
    if usage:
        counts = f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + generated},"completion_tokens":{generated}}}'
        yield f'data: {prefix},"choices":[],"usage":{counts}{fingerprint}}}\n\n'
    yield "data: [DONE]\n\n"
