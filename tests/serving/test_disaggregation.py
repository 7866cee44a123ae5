"""The decision and the fallback, with stand-ins for engines; real engines are in test_openai_api.py."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from strata.serving import disaggregation


def request() -> SimpleNamespace:
    return SimpleNamespace(
        prompt="x", n=1, use_beam_search=False, prompt_logprobs=None, echo=False, logprobs=None, truncate_prompt_tokens=None
    )


class Backend:
    def prepare_prefill_request(self, request: Any, peer: None) -> Any:
        return SimpleNamespace(**vars(request))

    def prepare_decode_request(self, request: Any, peer: None, prefill_response: Any) -> Any:
        return SimpleNamespace(**vars(request), kv_transfer_params=prefill_response.kv_transfer_params)


class Engine:
    _llm_config = SimpleNamespace(kv_connector_backend=Backend())

    async def completions(self, request: Any) -> AsyncIterator[Any]:
        async def chunks() -> AsyncIterator[Any]:
            yield getattr(request, "kv_transfer_params", "computed here")

        return chunks()


class Pool:
    """Stands where the handle of the prefill deployment does."""

    def __init__(self, outcome: Any) -> None:
        self.prefill = self
        self._outcome = outcome

    async def remote(self, method: str, request: Any) -> Any:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def ask(outcome: Any) -> tuple[str, list[Any]]:
    async def run() -> tuple[str, list[Any]]:
        answer = await disaggregation.run(Engine(), Pool(outcome), request())
        return answer.prefill.header(), [chunk async for chunk in answer.chunks]

    return asyncio.run(run())


def test_blocks_are_handed_over() -> None:
    blocks = {"remote_engine_id": "p-1"}
    assert ask(SimpleNamespace(kv_transfer_params=blocks)) == ("remote; engine=p-1", [blocks])


def test_a_lost_prefill_is_done_here() -> None:
    assert ask(ConnectionError("gone")) == ("local; reason=prefill-failed", ["computed here"])


def test_a_refused_prompt_is_refused() -> None:
    refusal = SimpleNamespace(error=SimpleNamespace(code=400))
    assert ask(refusal) == ("remote; refused", [refusal])
