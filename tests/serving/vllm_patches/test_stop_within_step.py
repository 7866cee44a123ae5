"""Answers with stop strings are the same for any number of tokens per step."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from strata.serving.vllm_patches import stop_within_step

WORDS = {word: number for number, word in enumerate("abcdefgh")}
ANSWER = [WORDS[word] for word in "abcdefgh"]


@pytest.fixture(params=[True, False], ids=["installed", "plain"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    for patched, name in ((BaseIncrementalDetokenizer, "update"), (LogprobsProcessor, "update_from_output")):
        monkeypatch.setattr(patched, name, getattr(patched, name))  # to be put back
    if request.param:
        stop_within_step.install()
    yield request.param


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    plain.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def answered(size: int, kind: RequestOutputKind, ended: FinishReason | None = None, **params: Any) -> list[Any]:
    """Text, token ids, logprobs and the reasons of an answer whose steps have `size` tokens."""
    sampling = SamplingParams(output_kind=kind, logprobs=0, max_tokens=20, **params)
    request = EngineCoreRequest("r", [0], None, sampling, None, 0.0, None, None, None)
    request.external_req_id = "r"
    words = tokenizer()
    processor = OutputProcessor(words, log_stats=False)
    processor.add_request(request, None)
    text, tokens, logprobs = "", [], []
    for begin in range(0, len(ANSWER), size):
        new = ANSWER[begin : begin + size]
        lists = LogprobsLists(np.array(new)[:, None], -np.array(new, np.float32)[:, None], np.ones(len(new)), None)
        last = begin + size >= len(ANSWER)
        made = processor.process_outputs(
            [EngineCoreOutput("r", list(new), new_logprobs=lists, finish_reason=ended if last else None)]
        )
        [output] = made.request_outputs
        [choice] = output.outputs
        delta = kind is RequestOutputKind.DELTA
        text = text + choice.text if delta else choice.text
        tokens = [*tokens, *choice.token_ids] if delta else list(choice.token_ids)
        given = [position[token].logprob for position, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        logprobs = [*logprobs, *given] if delta else given
        if output.finished:
            return [text, tokens, logprobs, choice.finish_reason, choice.stop_reason]
    return [text, tokens, logprobs, None, None]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["de"]},
        {"stop": ["f", "bc"]},  # the second is earlier in the text
        {"stop": ["h"], "ended": FinishReason.LENGTH},
        {"stop": ["g"], "ended": FinishReason.STOP},
        {"stop": ["c", "f"], "min_tokens": 4},
        {"stop": ["de"], "include_stop_str_in_output": True},
        {"stop": ["zz"], "ended": FinishReason.LENGTH},
        {"ended": FinishReason.STOP},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_steps(installed: bool, kind: RequestOutputKind, params: dict[str, Any]) -> None:
    single = answered(1, kind, **params)
    if installed:
        assert all(answered(size, kind, **params) == single for size in range(2, len(ANSWER) + 1))


def test_vllm_still_needs_it(installed: bool) -> None:
    answers = [answered(size, RequestOutputKind.DELTA, stop=["f", "bc"])[:2] for size in (1, 8)]
    assert (answers[0] == answers[1]) == installed, (
        "vLLM drops tokens behind a stop string now: remove serving/vllm_patches/stop_within_step.py."
    )
