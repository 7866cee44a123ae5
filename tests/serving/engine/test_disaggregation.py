"""Placement of prefills, and loss of a prefill engine before, during or after its prefill.

The engines are stand-ins; test_openai_api.py and test_failover.py have real engines.
"""

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import span_collector
from span_collector import attributes
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from strata.serving.engine import disaggregation, request_context
from strata.serving.engine.pool_load import PoolLoad
from strata.serving.engine.prefixes import Prefixes
from strata.serving.metrics import tracing
from strata.serving.metrics.telemetry import Replica as Telemetry
from strata.serving.routing.policy import Rule
from strata.serving.transport.link import SECRET_BYTES, Call, Link, Server
from strata.serving.transport.peers import Peer
from strata.serving.vllm_patches.engine_stats import EngineStats

SECRET = os.urandom(SECRET_BYTES)
ALWAYS = Rule(when="always", min_tokens=0, max_queue_s=1.0, stall_weight=0.0)
PROMPT = {"type": "token", "prompt_token_ids": [5, 6, 7]}


class Prefiller:
    """Prefill replica that returns blocks with its name, fails, never answers, or dies after its answer."""

    def __init__(self, name: str, does: str = "answers") -> None:
        self.name, self.does = name, does
        self.server = Server(self.handle, dict, SECRET)
        self.adapters: list[str | None] = []  # of the prompts it received
        self.traces: list[str] = []

    async def handle(self, call: Call) -> None:
        self.adapters.append(call.meta["adapter"])
        self.traces.append(call.meta["trace"].get("traceparent", ""))
        tokens = array("I")
        tokens.frombytes(call.body)
        assert tokens.tolist() == PROMPT["prompt_token_ids"]
        if self.does == "fails":
            raise RuntimeError("out of blocks")
        if self.does == "dies":
            self.server.close()
            await asyncio.sleep(60)
        call.end({"blocks": {"remote_engine_id": self.name}, "uncached": 3, "engine_s": 0.01})
        if self.does == "answers, then dies":
            asyncio.get_running_loop().call_later(0.1, self.server.close)


class Pool:
    def __init__(self, peers: list[Peer]) -> None:
        self._peers = peers

    def all(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.link.alive]

    def least_busy(self, without: frozenset[str], cost: Callable[[Peer], float]) -> Peer | None:
        return min((peer for peer in self.all() if peer.name not in without), key=cost, default=None)


class Vllm:
    """Engine that returns the blocks it received; blocks of an engine in `lost` never arrive."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 100)
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=2))
    errored = False

    def __init__(self, lost: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> None:
        self.lost, self.broken = lost, broken
        self.aborted: list[str] = []
        self.output_processor = SimpleNamespace(add_request=None)

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        source = ((params.extra_args or {}).get("kv_transfer_params") or {}).get("remote_engine_id", "computed here")
        if source in self.lost:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.aborted.append(source)
                raise
        finish = "error" if source in self.broken else "length"
        part = CompletionOutput(0, source, [1], None, None, finish_reason=finish)
        yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [part], finished=True)


def ask(
    prefillers: list[Prefiller],
    vllm: Vllm | None = None,
    params: SamplingParams | None = None,
    rule: Rule = ALWAYS,
    lora: LoRARequest | None = None,
    span: tracing.Span = tracing.OFF,
) -> tuple[str, str, str]:
    """Place and reason of the prefill, and the engine whose blocks were decoded."""

    async def run() -> tuple[str, str, str]:
        links = [await Link.connect(await p.server.listen("127.0.0.1"), SECRET, lambda _: None) for p in prefillers]
        pool = Pool([Peer(p.name, link, {}) for p, link in zip(prefillers, links, strict=True)])
        telemetry = Telemetry("tiny", "decode", "d-1")
        load = PoolLoad(EngineStats(telemetry, 1), rule.min_tokens)
        engine = disaggregation.Engine(vllm or Vllm(), pool, rule, Prefixes(), load, telemetry)  # type: ignore[arg-type]
        context = request_context.RequestContext(span=span)
        request_context.current.set(context)
        outputs = [o async for o in engine.generate(PROMPT, params or SamplingParams(), "r-1", lora_request=lora)]
        assert context.decision is not None and context.finished and context.unsent == [1]
        for link in links:
            link.close()
        return context.decision.where, context.decision.reason, outputs[0].outputs[0].text

    return asyncio.run(run())


def test_remote_prefill_transfers_its_blocks() -> None:
    assert ask([Prefiller("p-1")]) == ("remote", "always", "p-1")


def test_remote_prefill_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, working = Prefiller("p-1", "fails"), Prefiller("p-2")
    with span_collector.collecting(monkeypatch) as collected:
        span = tracing.Tracer("decode", "d-1").begin("generate", {})
        assert ask([failing, working], span=span) == ("remote", "always", "p-2")
        collected.wait(lambda found: len(found.named("prefill")) == 2 and bool(found.named("hand-over")))
    own = span.carrier["traceparent"].split("-")[2]
    assert {each.parent_span_id.hex() for each in collected.spans} == {own}
    tried = {attributes(each)["strata.peer"]: each for each in collected.named("prefill")}
    assert tried["p-1"].status.code == 2 and "out of blocks" in tried["p-1"].status.message and tried["p-2"].status.code == 0
    assert attributes(tried["p-2"])["strata.uncached_tokens"] == 3
    for prefiller in (failing, working):  # the prefill replica's spans are below those of the attempts
        attempt = tried[prefiller.name]
        assert [trace.split("-")[1:3] for trace in prefiller.traces] == [[attempt.trace_id.hex(), attempt.span_id.hex()]]
    assert attributes(collected.named("hand-over")[0]) == {"strata.tokens": 3, "strata.engine": "p-2"}


def test_remote_prefill_has_the_adapter_of_its_request() -> None:
    prefiller = Prefiller("p-1")
    for lora in (None, LoRARequest("tuned", 1, "/adapter")):
        ask([prefiller], lora=lora)
        prefiller.server = Server(prefiller.handle, dict, SECRET)
    assert prefiller.adapters == [None, "tuned"]


def test_adapter_and_salt_separate_prefixes() -> None:
    tuned = {"lora_request": LoRARequest("tuned", 1, "/adapter")}
    found = [disaggregation._salt(prompt, more) for prompt in ({}, {"cache_salt": "s"}) for more in (tuned, {})]
    assert found == [(None, "tuned"), (None, None), ("s", "tuned"), ("s", None)]


@pytest.mark.parametrize("trouble", ["fails", "dies"])
def test_lost_prefill_is_retried_on_another_engine(trouble: str) -> None:
    assert ask([Prefiller("p-1", trouble), Prefiller("p-2")]) == ("remote", "always", "p-2")


@pytest.mark.parametrize("trouble", ["fails", "dies"])
def test_prefill_is_local_after_the_last_prefill_engine_is_lost(trouble: str) -> None:
    assert ask([Prefiller("p-1", trouble)]) == ("local", "prefill-failed", "computed here")


def test_lost_blocks_are_recomputed_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "NOTICE_S", 0.2)
    vllm = Vllm(lost=("p-1",))
    assert ask([Prefiller("p-1", "answers, then dies")], vllm) == ("local", "prefill-failed", "computed here")
    assert vllm.aborted == ["p-1"]  # the request that waited for them holds no blocks


def test_failed_transfer_is_recomputed_locally() -> None:
    assert ask([Prefiller("p-1")], Vllm(broken=("p-1",))) == ("local", "prefill-failed", "computed here")


def test_prefill_is_local_without_a_pool() -> None:
    assert ask([]) == ("local", "no-prefill-engine", "computed here")


def test_short_prompts_are_prefilled_locally() -> None:
    rule = Rule(when="cheaper", min_tokens=256, max_queue_s=1.0, stall_weight=0.0)
    assert ask([Prefiller("p-1")], rule=rule) == ("local", "short", "computed here")


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(n=2, temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY), "several-sequences"),
        (SamplingParams(prompt_logprobs=1), "prompt-logprobs"),
    ],
)
def test_unsupported_parameters_are_prefilled_locally(params: SamplingParams, reason: str) -> None:
    assert ask([Prefiller("p-1")], params=params) == ("local", reason, "computed here")


def test_cancelled_request_is_cancelled_at_the_prefill_engine() -> None:
    async def run(test: Callable[[], Awaitable[None]]) -> None:
        await test()

    cancelled = asyncio.Event()

    class Hanging(Prefiller):
        async def handle(self, call: Call) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def test() -> None:
        prefiller = Hanging("p-1")
        link = await Link.connect(await prefiller.server.listen("127.0.0.1"), SECRET, lambda _: None)
        telemetry = Telemetry("tiny", "decode", "d-1")
        load = PoolLoad(EngineStats(telemetry, 1), 0)
        pool: Any = Pool([Peer("p-1", link, {})])
        engine = disaggregation.Engine(Vllm(), pool, ALWAYS, Prefixes(), load, telemetry)
        request_context.current.set(request_context.RequestContext())
        asking = asyncio.ensure_future(anext(engine.generate(PROMPT, SamplingParams(), "r-1")))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        assert load.queued_tokens(pool.all()[0]) == 0

    asyncio.run(run(test))


def test_response_to_two_prompts_finishes_with_the_second() -> None:
    may_end = asyncio.Event()

    class Waiting(Vllm):
        async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
            await (may_end.wait() if request_id == "slow" else asyncio.sleep(0.05))
            async for output in super().generate(prompt, params, request_id):
                yield output

    async def run() -> None:
        telemetry = Telemetry("tiny", "decode", "d-1")
        load = PoolLoad(EngineStats(telemetry, 1), 0)
        pool: Any = Pool([])
        engine = disaggregation.Engine(Waiting(), pool, ALWAYS, Prefixes(), load, telemetry)
        context = request_context.RequestContext()
        request_context.current.set(context)
        quick, slow = (
            asyncio.ensure_future(anext(engine.generate(PROMPT, SamplingParams(), name))) for name in ("quick", "slow")
        )
        await quick
        assert not context.finished
        may_end.set()
        await slow
        assert context.finished

    asyncio.run(run())


def test_first_token_of_an_answer_that_is_not_streamed() -> None:
    def ago_s(metrics: Any) -> float:
        return time.monotonic() - disaggregation._first_token_at(SimpleNamespace(metrics=metrics))  # type: ignore[arg-type]

    assert abs(ago_s(None)) < 0.5
    assert abs(ago_s(SimpleNamespace(first_token_ts=5.0, last_token_ts=12.0)) - 7.0) < 0.5
    assert abs(ago_s(SimpleNamespace(first_token_ts=5.0, last_token_ts=5.0))) < 0.5
