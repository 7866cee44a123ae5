"""Going on with a stream that another replica began.

The engine is given prompt + emitted tokens as its prompt. Everything above the engine must believe that it generated the
emitted ones itself: the detokenizer (half a character may be pending, a stop string half matched), usage, and vLLM's chat
parsers. So the detokenizer is fed the emitted tokens before the first new one arrives, and vLLM's OpenAI classes are shown
one output with all of them, whose events are not sent.
"""

from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer


class Resumption:
    """Hooks into the one place where a request's state above the engine is made, before any of its tokens can arrive."""

    def __init__(self, engine: Any) -> None:
        self._processor = engine.output_processor
        self._add_request = self._processor.add_request
        self._processor.add_request = self._add_and_prime
        self._expected: dict[str, tuple[list[int], tuple[int, ...], SamplingParams]] = {}
        self._texts: dict[str, str] = {}

    def expect(self, request_id: str, prompt: list[int], emitted: tuple[int, ...], params: SamplingParams) -> SamplingParams:
        """Parameters for the engine, which is to generate only the rest."""
        self._expected[request_id] = (prompt, emitted, params)
        rest = params.clone()
        assert params.max_tokens is not None
        rest.max_tokens = params.max_tokens - len(emitted)
        rest.min_tokens = max(0, params.min_tokens - len(emitted))
        return rest

    def forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)
        self._texts.pop(request_id, None)

    def shown(self, request_id: str, prompt: list[int], emitted: tuple[int, ...], params: SamplingParams) -> RequestOutput:
        """What the client has already, as one output."""
        nothing_known = [None] * len(emitted) if params.logprobs is not None else None
        output = CompletionOutput(
            index=0,
            text=self._texts.pop(request_id),
            token_ids=list(emitted),
            cumulative_logprob=None,
            logprobs=nothing_known,
        )
        return RequestOutput(request_id, None, prompt, None, [output], finished=False)

    def _add_and_prime(self, request: EngineCoreRequest, prompt: Any, parent: Any, index: int, queue: Any) -> None:
        self._add_request(request, prompt, parent, index, queue)
        # Kept until it is forgotten: a request whose blocks were lost on the way is added a second time.
        expected = self._expected.get(request.external_req_id or "")
        if expected is None:
            return
        prompt_ids, emitted, params = expected
        state = self._processor.request_states[request.request_id]
        as_it_began = EngineCoreRequest(
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
        detokenizer = IncrementalDetokenizer.from_new_request(self._processor.tokenizer, as_it_began)
        detokenizer.update(list(emitted), False)
        assert request.external_req_id is not None
        self._texts[request.external_req_id] = detokenizer.get_next_output_text(False, True)
        state.detokenizer = detokenizer
        state.prompt_token_ids = prompt_ids
