"""RPC handlers of a replica: OpenAI requests, and prefills on a prefill replica."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from strata.serving.adapters.entry import Entry
from strata.serving.adapters.registry import INSPECT, LOAD
from strata.serving.api import limits, vllm_messages
from strata.serving.api.dialects import errors, pooling
from strata.serving.api.grammar_trial import GrammarTrial
from strata.serving.api.headers import PREFILL
from strata.serving.api.requests import ApiError, validate
from strata.serving.engine import disaggregation, pooling_apis, request_context
from strata.serving.engine.lora import Lora
from strata.serving.engine.request_context import RequestContext
from strata.serving.engine.suspect_requests import Quarantine, cause_of_death, killed_for_memory
from strata.serving.engine.text_apis import TextApi, count_tokens, text_apis
from strata.serving.metrics import request_log, tracing
from strata.serving.routing.kv import prefix_chain
from strata.serving.routing.kv.prefix_log import PrefixLog
from strata.serving.transport.link import MAX_ANSWER_BYTES, PREFIXES, Call
from strata.serving.vllm_patches import fast_sse

logger = logging.getLogger("ray.serve")

Metrics = Callable[[], str]  # returns the Prometheus text of this replica
FLUSH_S = 0.2  # to send the last answers before the process exits


class DecodeCalls:
    def __init__(
        self,
        app_state: Any,
        engine: disaggregation.Engine,
        metrics: Metrics,
        max_sequences: int,
        model: str,
        tracer: tracing.Tracer,
        log: PrefixLog | None = None,
        lora: Lora | None = None,
    ) -> None:
        """`model` answers requests that name none. `log`: cached prefixes, None where no gateway routes by them. `lora`: adapters
        that come and go."""
        self.tracer, self._lora = tracer, lora
        self._engine = engine
        self._metrics = metrics
        self._max_sequences, self._model, self._log = max_sequences, model, log
        self.engine_failure = _EngineFailure(engine, engine.quarantine)
        self._trial = GrammarTrial(engine.model_config.model, engine.model_config.get_vocab_size())
        self._tokenization = app_state.serving_tokenization
        self._messages = getattr(app_state, "anthropic_serving_messages", None)
        generates = getattr(app_state, "openai_serving_chat", None) is not None
        self._apis = text_apis(app_state, engine) if generates else {}
        self._pooling = pooling_apis.pooling_apis(app_state)
        if generates:
            fast_sse.install(app_state.openai_serving_completion, app_state.openai_serving_chat)

    @property
    def able(self) -> list[str]:
        """Calls that the model has an answer for."""
        return [*self._apis, *self._pooling]

    async def handle(self, call: Call) -> None:
        request_log.current.set(call.meta.get("name", ""))
        try:
            if call.method in self._apis:
                await self._generate(call, self._apis[call.method])
            elif call.method in self._pooling:
                await self._pool(call)
            elif call.method in ("tokenize", "detokenize"):
                await self._tokenize(call)
            elif call.method == PREFIXES:
                await self._announce(call)
            elif call.method == "count_tokens" and self._messages is not None:
                await self._count_tokens(call)
            elif call.method in (INSPECT, LOAD) and self._lora is not None:
                await self._lora.handle(call)
            elif call.method == "metrics":
                _answer(call, 200, self._metrics().encode(), "text/plain")
            elif call.method in pooling.ROUTES:
                raise pooling.cannot(call.method, self.able)
            else:
                raise LookupError(f"no such call: {call.method}")
        except ApiError as error:
            _answer(call, error.status, errors.body(call.method, error), headers=error.headers)

    async def _announce(self, call: Call) -> None:
        """Streams the cached prefixes until the gateway is gone."""
        if self._log is None:
            raise LookupError("this replica announces no prefixes")
        subscription = self._log.subscribe()
        try:
            while True:
                call.data(await subscription.next())
        finally:
            subscription.close()

    async def _generate(self, call: Call, api: TextApi) -> None:
        tree = self._named(call)
        request = api.read(tree)
        limits.check(request, self._max_sequences)
        await self._trial.check(request)
        request.request_id = api.id_prefix + call.meta["request_id"]
        context = RequestContext(tuple(call.meta.get("resumed", ())), call.meta["request_id"], call.meta.get("strikes", 0))
        context.replaying = bool(context.resumed)
        context.events, context.created = call.meta.get("events", 0), call.meta.get("created", context.created)
        context.cache_salt = call.meta.get("cache_salt")
        context.speculate = call.meta.get("speculate", True)
        context.span = self.tracer.begin("generate", call.meta.get("trace", {}), api=call.method)
        context.adapter = call.meta.get("adapter")
        if self._log is not None:
            space = tree["model"] if context.adapter is None else Entry(**context.adapter).engine_name
            context.chain = prefix_chain.of(call.method, tree, space, context.cache_salt or "")
        request_context.current.set(context)
        try:
            with self.engine_failure.reported_to(call, context.request):
                async with self.adapter(context.adapter) as context.lora:
                    await self._respond(call, context, request, api)
        finally:
            _end_span(context)

    def adapter(self, tree: dict[str, Any] | None) -> AbstractAsyncContextManager[LoRARequest | None]:
        """Holds the adapter of a request in the engine."""
        if tree is None:
            return contextlib.nullcontext()
        if self._lora is None:
            raise LookupError("this engine has no adapters")
        return self._lora.used(tree)

    def _named(self, call: Call) -> dict[str, Any]:
        """Parsed request. One without a model gets this one: vLLM would answer with the base model, without its adapter. One with
        an alias gets the model that the gateway chose for it."""
        tree: dict[str, Any] = json.loads(call.body)
        return tree | {"model": call.meta.get("model") or tree.get("model") or self._model}

    async def _respond(self, call: Call, context: RequestContext, request: Any, api: TextApi) -> None:
        try:
            result = await api.create(request)
            if isinstance(result, ErrorResponse):
                self._refuse(call, context, request, result)
            elif hasattr(result, "__aiter__"):
                await (self._stream_together if api.several_events else self._stream)(call, context, request, result, api)
            else:
                trailer = _trailer(context, result) | self._explained(call, context)
                _answer(call, 200, api.dump(result, context), headers=_headers(context), trailer=trailer)
        except (ApiError, asyncio.CancelledError):
            raise
        except Exception as error:
            self._refuse(call, context, request, create_error_response(context.failure or error))

    async def _stream(self, call: Call, context: RequestContext, request: Any, events: AsyncIterator[str], api: TextApi) -> None:
        started = bool(context.resumed)
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if context.failure is not None:
                    # vLLM sends an error event; before the first token a status code is more useful to the client.
                    self._refuse(call, context, request, create_error_response(context.failure))
                    return
                if context.replaying:
                    continue
                if (wrong := vllm_messages.parse_error_event(event)) is not None:
                    event = f"data: {json.dumps(wrong.body)}\n\n"
                if not started:
                    started = True
                    call.head({"status": 200, "type": "text/event-stream", "headers": _headers(context)})
                call.data(context.pack_event(event))
        call.end(_trailer(context, None) | self._explained(call, context))

    def _explained(self, call: Call, context: RequestContext) -> dict[str, Any]:
        return {"explained": self._engine.explain(context)} if call.meta.get("explain") else {}

    async def _stream_together(
        self, call: Call, context: RequestContext, request: Any, events: AsyncIterator[Any], api: TextApi
    ) -> None:
        """Sends the events of each output of the engine together. Those before the first output and after the last one are sent
        with its events."""
        started, texts = bool(context.resumed), list[str]()

        def send() -> None:
            nonlocal started
            if not texts:
                return
            if not started:
                started = True
                call.head({"status": 200, "type": "text/event-stream", "headers": _headers(context)})
            payload = context.pack_event("".join(texts))
            if len(payload) > MAX_ANSWER_BYTES:
                raise _too_large()
            call.data(payload)
            texts.clear()

        context.output_done = lambda: None if context.finished else send()
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if context.failure is not None:
                    self._refuse(call, context, request, create_error_response(context.failure))
                    return
                if not context.replaying:
                    texts.append(event if api.event is None else api.event(event, context))
        send()
        call.end(_trailer(context) | self._explained(call, context))

    def _refuse(self, call: Call, context: RequestContext, request: Any, refusal: ErrorResponse) -> None:
        if isinstance(context.failure, EngineDeadError) or self._engine.errored:
            self.engine_failure.report()
            raise EngineDeadError
        if isinstance(context.failure, disaggregation.CrashesEngines):
            call.end({"lost": str(context.failure), "verdict": context.failure.verdict})
            return
        error = refusal.error
        if error.code >= 500 and limits.is_structured(request):
            raise ApiError(400, "The grammar allows no next token.", param="response_format")
        if error.code >= 500 or isinstance(context.failure, EngineGenerateError):
            raise context.failure or RuntimeError(error.message)  # not the client's fault: another replica may succeed
        shaped = vllm_messages.refusal(error)
        _answer(call, shaped.status, errors.body(call.method, shaped), headers=_headers(context))

    async def _tokenize(self, call: Call) -> None:
        tree = self._named(call)
        chat = "messages" in tree
        kind = DetokenizeRequest if call.method == "detokenize" else TokenizeChatRequest if chat else TokenizeCompletionRequest
        request = validate(tree, kind)
        limits.check_tokenizing(request, len(call.body))
        create = self._tokenization.create_detokenize if call.method == "detokenize" else self._tokenization.create_tokenize
        try:
            answer = await create(request, None)
        except Exception as error:  # no engine is involved: the cause is the client's data
            raise ApiError(400, f"The input cannot be {call.method}d: {error}") from None
        if isinstance(answer, ErrorResponse):
            raise vllm_messages.refusal(answer.error)
        _answer(call, 200, answer.model_dump_json().encode())

    async def _pool(self, call: Call) -> None:
        request = pooling_apis.read(call.method, self._named(call))
        limits.check(request, self._max_sequences)
        request.request_id = name = call.meta["request_id"]
        quarantine = self.engine_failure.quarantine
        with self.engine_failure.reported_to(call, name):
            try:
                await quarantine.enter(name, call.meta.get("strikes", 0))
                try:
                    answer = await self._pooling[call.method](request, None)
                finally:
                    if not self._engine.errored:  # after a failure the set is needed for the verdict
                        quarantine.leave(name)
            except Exception as error:
                if self._engine.errored:
                    self.engine_failure.report()
                    raise
                refused = create_error_response(error)
                if refused.error.code >= 500:
                    raise  # not the client's fault: another replica may succeed
                raise vllm_messages.refusal(refused.error) from None
        tokens = json.loads(answer.body)["usage"]["prompt_tokens"]
        _answer(call, 200, bytes(answer.body), trailer={"prompt_tokens": tokens, "tokens": 0})

    async def _count_tokens(self, call: Call) -> None:
        if len(call.body) > limits.MAX_TOKENIZE_BYTES:
            raise ApiError(400, f"At most {limits.MAX_TOKENIZE_BYTES} bytes can be counted per request.", param="messages")
        try:
            counted = await count_tokens(self._messages, self._named(call))
        except ApiError:
            raise
        except Exception as error:  # no engine is involved: the cause is the client's data
            raise ApiError(400, f"The tokens cannot be counted: {error}") from None
        if isinstance(counted, ErrorResponse):
            raise vllm_messages.refusal(counted.error)
        _answer(call, 200, json.dumps({"input_tokens": counted.input_tokens}).encode())


class PrefillCalls:
    def __init__(self, engine: Any, standby: DecodeCalls, adapters: Mapping[str, LoRARequest]) -> None:
        """`standby` handles requests while no decode replica is up; `adapters` are those of the engine's start, by name."""
        self._engine, self._adapters = engine, adapters
        self._standby = standby
        self.queued_tokens = 0

    async def handle(self, call: Call) -> None:
        if call.method != "prefill":
            await self._standby.handle(call)
            return
        tokens = len(call.body) // 4
        self.queued_tokens += tokens
        failure = self._standby.engine_failure
        request, adapter = call.meta["request"], call.meta["adapter"]
        request_log.current.set(call.meta.get("name", ""))
        span = self._standby.tracer.begin("prefill", call.meta.get("trace", {}), tokens=tokens)
        with failure.reported_to(call, request):
            try:
                await failure.quarantine.enter(request, call.meta["strikes"])
                try:
                    async with self._standby.adapter(call.meta["entry"]) as lora:
                        if lora is None and adapter:
                            lora = self._adapters[adapter]
                        asked = (call.body, call.meta["request_id"], call.meta["cache_salt"], lora, span.carrier)
                        done = await disaggregation.prefill(self._engine, *asked)
                finally:
                    if not self._engine.errored:  # after a failure the set is needed for the verdict
                        failure.quarantine.leave(request)
            except Exception:
                if self._engine.errored:
                    failure.report()
                raise
            finally:
                self.queued_tokens -= tokens
                span.end()
        call.end(done)


class _EngineFailure:
    """Ends a replica whose engine died. Callers receive the verdict on their requests and move them to other replicas; Serve
    starts a new replica."""

    def __init__(self, engine: Any, quarantine: Quarantine) -> None:
        self._processes = engine.engine_core.resources.engine_manager.processes
        self.quarantine = quarantine
        self._open: dict[Call, str] = {}  # open calls and their requests
        self._killed_for_memory = killed_for_memory()
        self._reported = False

    @contextlib.contextmanager
    def reported_to(self, call: Call, request: str) -> Iterator[None]:
        """Registers a call to be ended with a verdict if the engine dies within this block."""
        self._open[call] = request
        try:
            yield
        finally:
            del self._open[call]

    def report(self) -> None:
        if self._reported:  # by the first request that noticed
            return
        self._reported = True
        out_of_memory = killed_for_memory() > self._killed_for_memory
        cause, failed = cause_of_death([process.exitcode for process in self._processes], out_of_memory)
        logger.error("The engine died (%s); this replica exits.", cause)
        for call, request in self._open.items():
            verdict = self.quarantine.verdict(request) if failed else None
            call.end({"lost": f"the engine died: {cause}", "verdict": verdict, "ending": True})
        for call in self._open:
            call.close_server()
        asyncio.get_running_loop().call_later(FLUSH_S, os._exit, 1)


def _answer(
    call: Call,
    status: int,
    body: bytes,
    media: str = "application/json",
    headers: dict[str, str] | None = None,
    trailer: dict[str, Any] | None = None,
) -> None:
    if len(body) > MAX_ANSWER_BYTES:
        raise _too_large()
    call.head({"status": status, "type": media, "headers": headers or {}})
    call.data(body)
    call.end(trailer or {})


def _end_span(context: RequestContext) -> None:
    if context.first_token_at:
        context.span.child("decode", context.first_token_at, tokens=len(context.generated))
    where, reason = (context.decision.where, context.decision.reason) if context.decision else (None, None)
    context.span.end(error=str(context.failure or ""), prefill_where=where, prefill_reason=reason, prefill_engine=context.engine)


def _too_large() -> ApiError:
    limit = f"{MAX_ANSWER_BYTES // 2**20} MiB"
    return ApiError(400, f"The answer is larger than {limit}. Use stream=true, or request fewer tokens, sequences or logprobs.")


def _headers(context: RequestContext) -> dict[str, str]:
    if context.decision is None:
        return {}
    detail = f"engine={context.engine}" if context.engine else f"reason={context.decision.reason}"
    return {PREFILL: f"{context.decision.where}; {detail}"}


def _trailer(context: RequestContext, answer: Any = None) -> dict[str, Any]:
    """Numbers for the gateway's metrics. For an answer that is not streamed it cannot count the tokens itself."""
    trailer: dict[str, Any] = {"prompt_tokens": context.prompt_tokens, "queued_s": context.queued_s}
    if context.prefilled is not None:
        trailer["prefilled"] = context.prefilled
    if answer is not None:
        usage = answer.usage
        trailer["tokens"] = usage.completion_tokens if hasattr(usage, "completion_tokens") else usage.output_tokens
    return trailer
