"""Token ids at the limit of the embedding."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from strata.serving.vllm_patches import vocabulary

SIZE = 1000
BEYOND = [SIZE, SIZE + 1, 2**31, 2**32, 2**63 - 1, -1]


def processed(prompt: list[int] | None, **params: Any) -> Any:
    """Request after vLLM's input processor and the check."""
    known = SimpleNamespace(bad_words_token_ids=None, all_stop_token_ids=set()) if params == {} else SimpleNamespace(**params)
    request = SimpleNamespace(prompt_token_ids=prompt, sampling_params=known)
    processor = SimpleNamespace(process_inputs=lambda *arguments, **named: request)
    model = SimpleNamespace(get_vocab_size=lambda: SIZE)
    vocabulary.install(SimpleNamespace(input_processor=processor, model_config=model))
    return processor.process_inputs("r", {"type": "token"}, params=None)


def test_ids_within_the_embedding_pass() -> None:
    for prompt in ([0, SIZE - 1], [], None):
        assert processed(prompt).prompt_token_ids == prompt


@pytest.mark.parametrize("token", BEYOND)
def test_ids_beyond_the_embedding_are_refused(token: int) -> None:
    with pytest.raises(VLLMValidationError, match=f"'prompt' has the token id {token}; the model has the ids 0 to 999"):
        processed([1, token, 2])
    with pytest.raises(VLLMValidationError, match="'bad_words'"):
        processed([1], bad_words_token_ids=[[5], [5, token]], all_stop_token_ids=set())


def test_end_tokens_beyond_the_embedding_are_not_masked() -> None:
    request = processed([1], bad_words_token_ids=None, all_stop_token_ids={5, SIZE - 1, SIZE, SIZE + 7})
    assert request.sampling_params._all_stop_token_ids == {5, SIZE - 1}


def test_vllm_still_needs_it() -> None:
    source = inspect.getsource(InputProcessor)
    assert "max(tokenizer.max_token_id, model_vocab_size - 1)" in source, (
        "vLLM's InputProcessor compares prompt token ids with another limit: if it is the model's vocabulary, and 'bad_words' is "
        "compared with it too, remove vocabulary.py."
    )
