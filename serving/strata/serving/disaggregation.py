"""One request's way: prefilled by another engine, its KV blocks pulled over NIXL, decoded here.

Ray Serve LLM's own orchestrator always prefills remotely and hands a prefill failure to the client. Here a request that
cannot be handed over, or whose prefill failed, is prefilled by the decode engine itself, and the answer says so.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Prefill:
    """Where a prompt was prefilled and why, for the response header."""

    where: str  # remote | local
    detail: str

    def header(self) -> str:
        return f"{self.where}; {self.detail}"


@dataclass(frozen=True)
class Answer:
    prefill: Prefill
    chunks: AsyncIterator[Any]


def obstacle(request: Any) -> str | None:
    """Why this request cannot be split. The hand-over names the blocks of one sequence, computed without a look back:
    several sequences cannot share it, and logits of the prompt need the prompt's own forward pass."""
    if (request.n or 1) > 1 or request.use_beam_search:
        return "several-sequences"
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        return "several-prompts"
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt-embeddings"
    if request.prompt_logprobs is not None or (request.echo and getattr(request, "logprobs", None)):
        return "prompt-logprobs"
    if request.truncate_prompt_tokens is not None:
        return "truncated-prompt"
    return None


async def run(server: Any, prefill_pool: Any, request: Any) -> Answer:
    """`server` is the decode engine's LLMServer, `prefill_pool` the handle of the prefill deployment."""
    method = "chat" if hasattr(request, "messages") else "completions"
    reason = obstacle(request)
    if reason is None:
        backend = server._llm_config.kv_connector_backend
        prefill_request = backend.prepare_prefill_request(request=request, peer=None)
        prefill_request.min_tokens = 0  # the one token of a prefill may be fewer than the client's minimum
        try:
            response = await prefill_pool.prefill.remote(method, prefill_request)
        except Exception:
            # Whatever took the prefill engine away, this engine can still do all of the work.
            logger.exception("Remote prefill failed; prefilling on the decode engine.")
            reason = "prefill-failed"
        else:
            if getattr(response, "error", None) is not None:
                return Answer(Prefill("remote", "refused"), _once(response))
            request = backend.prepare_decode_request(request=request, peer=None, prefill_response=response)
            chunks = await getattr(server, method)(request)
            return Answer(Prefill("remote", f"engine={request.kv_transfer_params['remote_engine_id']}"), chunks)
    return Answer(Prefill("local", f"reason={reason}"), await getattr(server, method)(request))


async def _once(item: Any) -> AsyncIterator[Any]:
    yield item
