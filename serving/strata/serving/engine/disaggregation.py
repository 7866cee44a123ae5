"""Engine client for vLLM's OpenAI classes whose `generate` prefills locally or remotely and resumes migrated streams.

Everything above it (chat templates, tools, logprobs, usage) is vLLM's and unaware of it. If a prefill engine dies before,
during or after a prefill, the request is not lost: it is prefilled on another engine, and finally here.
"""

import asyncio
import json
import logging
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from strata.serving.engine import request_context
from strata.serving.engine.pool_load import PoolLoad
from strata.serving.engine.prefixes import Prefixes
from strata.serving.engine.request_context import RequestContext
from strata.serving.engine.suspect_requests import Quarantine
from strata.serving.metrics import request_log
from strata.serving.metrics.telemetry import Replica as Telemetry
from strata.serving.routing import policy
from strata.serving.routing.kv.cached_blocks import Salt
from strata.serving.routing.policy import NOTICE_S, REMOTE_TRIES, Decision
from strata.serving.speculation.settings import OFF
from strata.serving.tenants import cache_salt
from strata.serving.transport.link import Kind, LinkLost, Stream
from strata.serving.transport.peers import Peer, Peers
from strata.serving.vllm_patches import vocabulary
from strata.serving.vllm_patches.resume import Resumption

logger = logging.getLogger("ray.serve")

POLL_S = 0.25
# `kv_transfer_params` of vLLM's offloading connector: a prompt that another engine has prefilled does not wait for a disk.
NOT_FROM_DISK: dict[str, Any] = {"kv_load_tiers": []}
# `kv_transfer_params` of vLLM's NIXL connector for a prompt that another engine will decode.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# First output of a request, and an iterator over the rest.
Begun = tuple[RequestOutput, AsyncIterator[RequestOutput]]


class BlocksLost(Exception):
    """The KV blocks of a remote prefill did not arrive."""


class CrashesEngines(Exception):
    """The request crashed as many engines as a request may crash."""

    def __init__(self, verdict: dict[str, Any]) -> None:
        super().__init__(f"{verdict['strikes']} engines failed while running this request")
        self.verdict = verdict


def obstacle(prompt: Any, params: SamplingParams) -> str | None:
    """Reason why a request cannot be prefilled remotely, or None. A KV transfer names the blocks of one sequence, so several
    sequences cannot share it; a prefill engine is sent token ids, which do not have the images; prompt logprobs need the forward
    pass of the prompt on the decode engine."""
    if params.n > 1:
        return "several-sequences"
    if prompt.get("type") == "multimodal":
        return "images"
    if prompt.get("type") != "token":
        return "not-tokens"
    if params.prompt_logprobs is not None:
        return "prompt-logprobs"
    return None


def quarantine_of(engine: Any) -> Quarantine:
    return Quarantine(lambda: any(state.is_prefilling for state in engine.output_processor.request_states.values()))


class Engine:
    """Proxy of vLLM's `AsyncLLM` that replaces `generate`; other attributes are those of the real engine."""

    def __init__(
        self,
        real: Any,
        pool: Peers | None,
        rule: policy.Rule,
        prefixes: Prefixes,
        load: PoolLoad,
        telemetry: Telemetry,
        standby: bool = False,
    ) -> None:
        """`standby`: this is a prefill engine that decodes because no decode replica is up."""
        self._real = real
        self._pool = pool
        self._rule = rule
        self._prefixes = prefixes
        self._load = load
        self._telemetry = telemetry
        self._standby = standby
        self._resumption = Resumption(real)
        self.quarantine = quarantine_of(real)
        self._entered: set[str] = set()  # sequences that are on the engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncIterator[RequestOutput]:
        context = request_context.current.get()
        context.open += 1
        if context.lora is not None:  # vLLM's classes know it by its public name
            more = {**more, "lora_request": context.lora}
        if context.span.carrier:
            more = {**more, "trace_headers": context.span.carrier}
        if context.cache_salt:
            prompt = {**prompt, "cache_salt": cache_salt.combined(context.cache_salt, prompt.get("cache_salt"))}
        if not context.speculate:
            sampling_params = sampling_params.clone()
            sampling_params.extra_args = {**(sampling_params.extra_args or {}), OFF: True}
        try:
            params = sampling_params
            if context.resumed:
                original = list(prompt["prompt_token_ids"])
                params = self._resumption.expect(request_id, original, context.resumed, sampling_params)
                prompt = {**prompt, "prompt_token_ids": [*original, *context.resumed]}
            first, outputs = await self._begin(context, prompt, params, request_id, more)
            if context.resumed:
                context.replaying = True
                for replayed in self._resumption.replay(request_id, original, context.resumed, sampling_params):
                    yield replayed
                context.replaying = False
                _output_done(context)
            context.first_token_at = context.first_token_at or _first_token_at(first)
            _count_prompt(context, first)
            _count_output(context, first)
            yield first
            _output_done(context)
            # Now, since vLLM has checked the token ids, the blocks are stored, and the client has its first token.
            self._prefixes.register_prompt(context, prompt, _salt(prompt, more))
            async for output in outputs:
                _count_output(context, output)
                yield output
                _output_done(context)
            if sampling_params.n == 1 and not context.resumed:  # otherwise the answer is not one text of this replica
                self._prefixes.register_answer(context, prompt, _salt(prompt, more))
        except Exception as error:
            context.failure = error
            raise
        finally:
            self._resumption.forget(request_id)
            if request_id in self._entered and not self._real.errored:  # after a failure the set is needed for the verdict
                self._entered.remove(request_id)
                self.quarantine.leave(context.request)

    async def _enter(self, context: RequestContext, request_id: str) -> None:
        if request_id not in self._entered:
            await self.quarantine.enter(context.request, context.strikes)
            self._entered.add(request_id)

    async def _begin(self, context: RequestContext, prompt: Any, params: SamplingParams, request_id: str, more: Any) -> Begun:
        decision, cached = self._decide(prompt, params, more)
        if decision.where == "remote":
            begun = await self._begin_remotely(context, decision, prompt, params, request_id, more)
            if begun is not None:
                self._count_moved(context, len(prompt["prompt_token_ids"]), cached)
                return begun
            decision = Decision("local", "prefill-failed")
        self._record_decision(context, decision, "")
        began = time.monotonic()
        await self._enter(context, request_id)
        with self._load.prefilling_here(len(prompt.get("prompt_token_ids", ())) - cached):
            outputs = self._real.generate(prompt, params, request_id, **more)
            first = await anext(outputs)
        context.cached_tokens += first.num_cached_tokens or 0
        context.prefilled = self._load.prefilled_locally(first)
        if context.span.on:
            scheduled = began + _queued_s(first)
            context.span.child("queue", began, scheduled)
            placed = {"where": decision.where, "reason": decision.reason, "cached_tokens": cached}
            context.span.child("prefill", scheduled, _first_token_at(first), **placed)
        return first, outputs

    async def _begin_remotely(
        self, context: RequestContext, decision: Decision, prompt: Any, params: SamplingParams, request_id: str, more: Any
    ) -> Begun | None:
        transfer = await self._prefill_remotely(context, prompt, request_id, more)
        if transfer is None:
            return None
        peer, blocks = transfer
        remote = params.clone()
        remote.extra_args = {**(params.extra_args or {}), "kv_transfer_params": blocks | NOT_FROM_DISK}
        await self._enter(context, request_id)
        began = time.monotonic()
        outputs = self._real.generate(prompt, remote, request_id, **more)
        try:
            first = await _first(outputs, peer)
        except BlocksLost as error:
            logger.warning("%s; prefilling on the decode engine.", error)
            self._telemetry.remote_prefill_failed()
            return None
        self._load.record_handoff(len(prompt["prompt_token_ids"]), time.monotonic() - began)
        moved = {"tokens": len(prompt["prompt_token_ids"]), "engine": blocks["remote_engine_id"]}
        context.span.child("hand-over", began, _first_token_at(first), **moved)
        self._record_decision(context, decision, blocks["remote_engine_id"])
        return first, outputs

    def _record_decision(self, context: RequestContext, decision: Decision, engine: str) -> None:
        if context.decision is None:
            context.decision, context.engine = decision, engine
        self._telemetry.prefilled(decision.where, decision.reason)

    def _count_moved(self, context: RequestContext, tokens: int, cached: int) -> None:
        """Counts the transfer of a prompt. Its blocks are moved whole, except those that are here already."""
        size = self._real.vllm_config.cache_config.block_size
        blocks = -(-tokens // size) - cached // size
        context.cached_tokens += cached
        context.moved_tokens += tokens - cached
        context.moved_blocks += blocks
        self._load.moved(blocks)

    def explain(self, context: RequestContext) -> dict[str, Any]:
        """Place of a request's prefill, and what was found in caches or transferred for it."""
        where: dict[str, Any] = {}
        if context.decision is not None:
            where = {"where": context.decision.where, "reason": context.decision.reason}
        if context.engine:
            where |= {"engine": context.engine, "seconds": round(context.prefill_s, 4)}
        remote = context.prefill_cached_tokens if context.engine else 0  # a prefill whose blocks were lost saved nothing
        return {
            "prefill": where,
            "prompt_tokens": context.prompt_tokens,
            "cached_tokens": {"decode": context.cached_tokens, "prefill": remote},
            "moved_tokens": context.moved_tokens,
            "moved_bytes": self._load.moved_bytes(context.moved_blocks) if context.moved_blocks else 0,
        }

    def _decide(self, prompt: Any, params: SamplingParams, more: Any) -> tuple[Decision, int]:
        reason = policy.ON_STANDBY if self._standby else obstacle(prompt, params)
        if reason is not None:
            return Decision("local", reason), 0
        tokens = prompt["prompt_token_ids"]
        cached = self._prefixes.cached_tokens(tokens, _salt(prompt, more)) if self._pool is not None else 0
        sized = policy.Prompt(tokens=len(tokens), cached=cached)
        return policy.decide(sized, self._load.here(), self._load.pool(self._pool), self._load.rates(), self._rule), cached

    async def _prefill_remotely(
        self, context: RequestContext, prompt: Any, request_id: str, more: Any
    ) -> tuple[Peer, dict[str, Any]] | None:
        """Prefill engine and the transfer parameters of its blocks; None if no prefill engine succeeded."""
        assert self._pool is not None
        tried: frozenset[str] = frozenset()
        tokens = prompt["prompt_token_ids"]
        vocabulary.check(tokens, self._real.model_config.get_vocab_size(), "prompt")
        body = array("I", tokens).tobytes()
        for _ in range(REMOTE_TRIES):
            peer = self._pool.least_busy(tried, cost=lambda peer: self._load.cost(peer, _adapter(more)))
            if peer is None or peer.name in tried:
                return None
            tried |= {peer.name}
            with self._load.prefilling_at(peer, len(tokens)):
                began = time.monotonic()
                attempt = context.span.begin("prefill", "client", where="remote", peer=peer.name, tokens=len(tokens))
                meta = {"request_id": request_id, "cache_salt": prompt.get("cache_salt"), "adapter": _adapter(more)}
                meta["entry"] = context.adapter
                meta |= {"trace": attempt.carrier, "name": request_log.current.get()}
                call = peer.link.call("prefill", meta | {"request": context.request, "strikes": context.strikes}, body)
                try:
                    answer = await _only(call)
                except LinkLost as error:
                    attempt.end(error=str(error))
                    logger.warning("Prefill on %s failed: %s", peer.name, error)
                    self._telemetry.remote_prefill_failed()
                    if error.verdict is not None:
                        context.strikes = error.verdict["strikes"]
                        if error.verdict["guilty"]:
                            raise CrashesEngines(error.verdict) from None
                    continue
                finally:
                    call.cancel()
            seconds = time.monotonic() - began
            context.prefill_s += seconds
            context.prefill_cached_tokens += len(tokens) - answer["uncached"]
            self._telemetry.remote_prefill(seconds)
            attempt.end(uncached_tokens=answer["uncached"])
            self._load.prefilled_remotely(answer["uncached"], answer["engine_s"])
            return peer, answer["blocks"]
        return None


def _adapter(more: Any) -> str | None:
    """Name of the adapter that a request runs with."""
    lora: LoRARequest | None = more.get("lora_request")
    return lora.lora_name if lora is not None else None


def _salt(prompt: Any, more: Any) -> Salt:
    """Requests with different salts share no KV blocks. vLLM's block hashes contain both parts too."""
    return prompt.get("cache_salt"), _adapter(more)


async def _only(call: Stream) -> dict[str, Any]:
    kind, payload = await call.next()
    assert kind == Kind.END
    answer: dict[str, Any] = json.loads(payload)
    return answer


async def _first(outputs: AsyncIterator[RequestOutput], peer: Peer) -> RequestOutput:
    """First output after a KV transfer. vLLM recomputes blocks whose transfer failed, but cannot always distinguish a dead peer
    from a slow one; the link to its replica can."""
    waiting = asyncio.ensure_future(anext(outputs))
    gone_since: float | None = None
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=POLL_S)
            if done:
                first = waiting.result()
                if first.outputs and first.outputs[0].finish_reason == "error":
                    raise BlocksLost(f"KV blocks of {peer.name} did not arrive")
                return first
            if not peer.link.alive:
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > NOTICE_S:
                    raise BlocksLost(f"{peer.name} died before its KV blocks were read")
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})


def _output_done(context: RequestContext) -> None:
    if context.output_done is not None:
        context.output_done()


def _count_prompt(context: RequestContext, first: RequestOutput) -> None:
    context.prompt_tokens += len(first.prompt_token_ids or ())
    context.queued_s = _queued_s(first) or context.queued_s


def _first_token_at(first: RequestOutput) -> float:
    """Time of the first token. The first output of a request that is not streamed has all of them."""
    decoded_s = first.metrics.last_token_ts - first.metrics.first_token_ts if first.metrics is not None else 0.0
    return time.monotonic() - decoded_s


def _queued_s(first: RequestOutput) -> float:
    known = first.metrics is not None and first.metrics.scheduled_ts
    return float(first.metrics.scheduled_ts - first.metrics.queued_ts) if known else 0.0


def _count_output(context: RequestContext, output: RequestOutput) -> None:
    for part in output.outputs:
        if part.finish_reason == "error":
            raise RuntimeError("the engine ended this request with an error")
        context.unsent.extend(part.token_ids)
        context.generated.extend(part.token_ids)
        if context.chain is not None:
            context.answer.append(part.text)
    if output.finished:
        context.open -= 1
        context.finished = context.open == 0


def _of_prompt(transfer: dict[str, Any], tokens: int, block_size: int) -> dict[str, Any]:
    """Transfer parameters without blocks behind the prompt. An engine with a draft model has one for the draft's next token if
    the prompt fills its last block, and the reader of a longer list takes its last blocks: those of other positions."""
    blocks = -(-tokens // block_size)
    return transfer | {"remote_block_ids": [group[:blocks] for group in transfer["remote_block_ids"]]}


async def prefill(
    engine: Any,
    tokens: bytes,
    request_id: str,
    cache_salt: str | None,
    lora: LoRARequest | None,
    trace: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a prompt on a prefill engine. Generates and discards one token; returns the transfer parameters of the blocks, the
    number of computed tokens, and the time."""
    from vllm.inputs.engine import tokens_input

    ids = array("I")
    ids.frombytes(tokens)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": dict(REMOTE_DECODE)},
    )
    last: RequestOutput | None = None
    inputs = tokens_input(ids.tolist(), cache_salt=cache_salt)
    async for output in engine.generate(inputs, params, request_id, lora_request=lora, trace_headers=trace or None):
        last = output
    if last is None or last.kv_transfer_params is None:
        raise RuntimeError("the engine returned no kv_transfer_params")
    clock = last.metrics
    return {
        "blocks": _of_prompt(last.kv_transfer_params, len(ids), engine.vllm_config.cache_config.block_size),
        "uncached": len(ids) - (last.num_cached_tokens or 0),
        "engine_s": clock.first_token_ts - clock.scheduled_ts if clock is not None else 0.0,
    }
