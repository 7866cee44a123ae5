"""Resumption of a stream on another replica, with vLLM's own output processor."""

import inspect
from types import SimpleNamespace

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from strata.serving.vllm_patches.resume import Resumption


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that a character can be split between two replicas."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_stream_resumes_within_a_character() -> None:
    tokenizer = byte_tokenizer()
    prompt, answer = tokenizer.encode("Say it: "), tokenizer.encode("a ☃!")
    emitted, rest = tuple(answer[:4]), answer[4:]  # the snowman has three bytes; two were emitted
    engine = SimpleNamespace(output_processor=OutputProcessor(tokenizer, log_stats=False))
    resumption = Resumption(engine)
    params = SamplingParams(max_tokens=9, min_tokens=5, logprobs=0, output_kind=RequestOutputKind.DELTA)
    remaining = resumption.expect("r", prompt, emitted, params)
    assert (remaining.max_tokens, remaining.min_tokens) == (5, 1)
    request = EngineCoreRequest(
        request_id="r-1",
        prompt_token_ids=[*prompt, *emitted],
        mm_features=None,
        sampling_params=remaining,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="r",
    )
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r-1")
    engine.output_processor.add_request(request, None, None, 0, queue)

    replayed = [output.outputs[0] for output in resumption.replay("r", prompt, emitted, params)]
    texts = ["a", " ", "", ""]
    assert [(output.text, output.token_ids) for output in replayed] == [(t, [e]) for t, e in zip(texts, emitted, strict=True)]
    sampled = np.array(rest).reshape(-1, 1)
    logprobs = LogprobsLists(sampled, np.zeros_like(sampled, dtype=np.float32), np.ones(len(rest), dtype=int), None)
    engine.output_processor.process_outputs([EngineCoreOutput(request_id="r-1", new_token_ids=rest, new_logprobs=logprobs)])
    output = queue.get_nowait()
    assert output is not None
    assert (output.outputs[0].text, output.prompt_token_ids) == ("☃!", prompt)
    named = output.outputs[0].logprobs
    assert named is not None
    assert [position[token].decoded_token for position, token in zip(named, rest, strict=True)] == ["☃", "!"]


def test_vllm_still_needs_it() -> None:
    parameters = list(inspect.signature(OutputProcessor.add_request).parameters)
    assert parameters == ["self", "request", "prompt", "parent_req", "request_index", "queue"], (
        f"OutputProcessor.add_request has the parameters {parameters}: review resume.py."
    )
    fields = [name for name in EngineCoreRequest.__struct_fields__ if "output_token" in name or "generated" in name]
    assert not fields, f"EngineCoreRequest has {fields}: an engine may accept tokens that count as generated. Review resume.py."
