"""Resumes a stream that another replica started.

The engine receives prompt + emitted tokens as its prompt. Everything above the engine must treat the emitted tokens as
generated: the detokenizer (a character may be incomplete, a stop string partly matched), log probabilities (they name a character
at its last token), usage, and vLLM's chat parsers. So the first two receive the emitted tokens before the first new one arrives,
and vLLM's OpenAI classes receive an output for each of them, whose events are not sent. One output for all would not do: some
parsers treat a mark of reasoning that arrives with the text after it as text.

Written for vLLM 0.29. No longer needed when an engine request can carry tokens that count as generated; the test of this file
fails when a field for them appears, or when the interfaces used here change.
"""

from collections.abc import Iterator
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor


class Resumption:
    """Wraps `OutputProcessor.add_request`, which creates a request's state before any of its tokens can arrive."""

    def __init__(self, engine: Any) -> None:
        self._processor = engine.output_processor
        self._add_request = self._processor.add_request
        self._processor.add_request = self._add_and_prime
        self._expected: dict[str, tuple[list[int], tuple[int, ...], SamplingParams]] = {}
        self._texts: dict[str, list[str]] = {}  # of each emitted token

    def expect(self, request_id: str, prompt: list[int], emitted: tuple[int, ...], params: SamplingParams) -> SamplingParams:
        """Registers a request to resume. Returns the sampling parameters for the remaining tokens."""
        self._expected[request_id] = (prompt, emitted, params)
        rest = params.clone()
        assert params.max_tokens is not None
        rest.max_tokens = params.max_tokens - len(emitted)
        rest.min_tokens = max(0, params.min_tokens - len(emitted))
        return rest

    def forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)
        self._texts.pop(request_id, None)

    def replay(
        self, request_id: str, prompt: list[int], emitted: tuple[int, ...], params: SamplingParams
    ) -> Iterator[RequestOutput]:
        """Outputs with the tokens that the client has already received."""
        no_logprobs = [None] if params.logprobs is not None else None
        for token, text in zip(emitted, self._texts.pop(request_id), strict=True):
            output = CompletionOutput(index=0, text=text, token_ids=[token], cumulative_logprob=None, logprobs=no_logprobs)
            yield RequestOutput(request_id, None, prompt, None, [output], finished=False)

    def _add_and_prime(self, request: EngineCoreRequest, prompt: Any, parent: Any, index: int, queue: Any) -> None:
        self._add_request(request, prompt, parent, index, queue)
        # Not removed here: a request whose KV transfer failed is added a second time.
        expected = self._expected.get(request.external_req_id or "")
        if expected is None:
            return
        prompt_ids, emitted, params = expected
        state = self._processor.request_states[request.request_id]
        original = EngineCoreRequest(
            request_id=request.request_id,
            prompt_token_ids=prompt_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=request.arrival_time,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self._processor.tokenizer, original)
        texts = []
        for token in emitted:
            detokenizer.update([token], False)
            texts.append(detokenizer.get_next_output_text(False, True))
        assert request.external_req_id is not None
        self._texts[request.external_req_id] = texts
        state.detokenizer = detokenizer
        state.prompt_token_ids = prompt_ids
        _follow(state.logprobs_processor, emitted)


def _follow(processor: LogprobsProcessor, emitted: tuple[int, ...]) -> None:
    """Lets log probabilities name the whole character of a token whose first bytes are among the emitted tokens."""
    sampled = processor._get_sampled_context_ids

    def context(source: Any, most: int = 4) -> list[int]:
        found = sampled(source, most)
        return [*emitted, *found][-most:] if source is processor.logprobs else found

    processor._get_sampled_context_ids = context
