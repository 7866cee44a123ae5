"""Explanation of an answer by its replica: where the prompt was prefilled, cached tokens, and transferred KV blocks."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from strata.serving.engine import disaggregation, request_context
from strata.serving.engine.pool_load import PoolLoad
from strata.serving.engine.prefixes import Prefixes
from strata.serving.metrics.telemetry import Replica as Telemetry
from strata.serving.transport.link import Call, Link
from strata.serving.transport.peers import Peer
from strata.serving.vllm_patches.engine_stats import EngineStats

from .test_disaggregation import ALWAYS, PROMPT, SECRET, Pool, Prefiller, Vllm


class Cached(Vllm):
    """Engine with `cached` tokens of a prompt in its cache; a transfer brings the rest."""

    def __init__(self, cached: int, **trouble: Any) -> None:
        super().__init__(**trouble)
        self.cached = cached

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **more: Any) -> Any:
        async for output in super().generate(prompt, params, request_id, **more):
            moved = "kv_transfer_params" in (params.extra_args or {})
            output.num_cached_tokens = len(prompt["prompt_token_ids"]) if moved else self.cached
            yield output


class HalfCached(Prefiller):
    """Prefill replica with one of the three tokens in its cache."""

    async def handle(self, call: Call) -> None:
        call.end({"blocks": {"remote_engine_id": self.name}, "uncached": 2, "engine_s": 0.01})


class Known(Prefixes):
    """Index of an engine that has the first `tokens` of every prompt in its cache."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def cached_tokens(self, token_ids: Sequence[int], salt: Any) -> int:
        return self.tokens


def explain(vllm: Cached, prefiller: Prefiller | None, known: int = 0, reported: float = 0.0) -> dict[str, Any]:
    """`known`: tokens of the prompt in the cache, whose blocks have two; `reported`: bytes of these transfers and of ten
    blocks before."""

    async def run() -> dict[str, Any]:
        peers = []
        if prefiller is not None:
            peers = [Peer("p", await Link.connect(await prefiller.server.listen("127.0.0.1"), SECRET, lambda _: None), {})]
        telemetry = Telemetry("tiny", "decode", "d-1")
        stats, prefixes = EngineStats(telemetry, 1), Known(known)
        load = PoolLoad(stats, 0)
        load.moved(10)
        stats.bytes_moved = reported
        pool: Any = Pool(peers)
        engine = disaggregation.Engine(vllm, pool, ALWAYS, prefixes, load, telemetry)
        context = request_context.RequestContext()
        request_context.current.set(context)
        outputs: list[RequestOutput] = [o async for o in engine.generate(PROMPT, SamplingParams(), "r-1")]
        assert len(outputs) == 1
        for peer in peers:
            peer.link.close()
        return engine.explain(context)

    return asyncio.run(run())


def test_local_prefill_names_its_reason_and_the_cached_tokens() -> None:
    assert explain(Cached(2), None, 0, 640.0) == {
        "prefill": {"where": "local", "reason": "no-prefill-engine"},
        "prompt_tokens": 3,
        "cached_tokens": {"decode": 2, "prefill": 0},
        "moved_tokens": 0,
        "moved_bytes": 0,
    }


@pytest.mark.parametrize(
    ("known", "reported", "moved", "size"), [(0, 12 * 64.0, 3, 128), (2, 11 * 64.0, 1, 64), (2, 0.0, 1, None)]
)
def test_remote_prefill_moves_whole_blocks_that_are_not_here(known: int, reported: float, moved: int, size: int | None) -> None:
    found = explain(Cached(0), HalfCached("p-1"), known, reported)
    seconds = found["prefill"].pop("seconds")
    assert 0 < seconds < 20
    assert found == {
        "prefill": {"where": "remote", "reason": "always", "engine": "p-1"},
        "prompt_tokens": 3,
        "cached_tokens": {"decode": known, "prefill": 1},
        "moved_tokens": moved,
        "moved_bytes": size,
    }


def test_a_prefill_whose_blocks_were_lost_saved_nothing() -> None:
    found = explain(Cached(0, broken=("p-1",)), HalfCached("p-1"), 0, 640.0)
    assert found["prefill"] == {"where": "local", "reason": "prefill-failed"}
    assert found["cached_tokens"] == {"decode": 0, "prefill": 0} and found["moved_tokens"] == found["moved_bytes"] == 0


def test_load_of_an_engine_is_reported() -> None:
    stats = EngineStats(Telemetry("tiny", "decode", "d-1"), 1)
    stats.running, stats.waiting, stats.kv_usage = 3, 1, 0.123456
    assert stats.load() == {"running": 3, "waiting": 1, "kv_usage": 0.1235}
