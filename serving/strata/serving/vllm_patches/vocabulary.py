"""Refuses token ids outside the model's embedding, in every request that is about to reach an engine.

vLLM compares the ids of a prompt with the larger of the tokenizer's and the model's vocabulary, and its tokenizer limit is one
too high: id V of a model with V embeddings passes, the embedding raises IndexError, and the engine dies. The ids of `bad_words`
are compared only with the tokenizer's vocabulary. `logit_bias`, `stop_token_ids`, `allowed_token_ids` and `logprob_token_ids`
are compared with the model's, which is correct.

Written for vLLM 0.29. No longer needed when vLLM's input processor compares all of them with the model's vocabulary.
"""

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError


def check(ids: Sequence[int] | None, size: int, name: str) -> None:
    """Raises the error of vLLM's own checks, which its OpenAI classes answer with a 400."""
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return
    wrong = next(token for token in ids if not 0 <= token < size)
    message = f"'{name}' has the token id {wrong}; the model has the ids 0 to {size - 1}."
    raise VLLMValidationError(message, parameter=name, value=wrong)


def install(engine: Any) -> None:
    """Wraps vLLM's input processor to check every request: text can tokenize to ids that only the tokenizer knows, and a
    resumed stream has ids that another replica generated."""
    processor, size = engine.input_processor, engine.model_config.get_vocab_size()
    process = processor.process_inputs

    def process_and_check(*arguments: Any, **named: Any) -> Any:
        request = process(*arguments, **named)
        check(request.prompt_token_ids, size, "prompt")
        params = request.sampling_params
        if params is not None:
            for word in params.bad_words_token_ids or ():
                check(word, size, "bad_words")
            # The model's own end tokens may lie beyond its embedding. It never generates them, but 'min_tokens' masks them.
            params._all_stop_token_ids = {token for token in params.all_stop_token_ids if token < size}
        return request

    processor.process_inputs = process_and_check
