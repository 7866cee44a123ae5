"""Refuses token ids that the model's embedding does not have, in everything that is about to reach an engine.

vLLM compares the ids of a prompt with the larger of the tokenizer's and the model's vocabulary, and counts the tokenizer's one
too high: id V of a model with V embeddings passes, the embedding raises IndexError, and the engine dies. The ids of `bad_words`
are compared with the tokenizer's alone. `logit_bias`, `stop_token_ids`, `allowed_token_ids` and `logprob_token_ids` are compared
with the model's, as they should be. Written for vLLM 0.29; no longer needed where its input processor does so with all of them.
"""

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError


def check(ids: Sequence[int] | None, size: int, name: str) -> None:
    """Raises what vLLM's own checks raise, which its OpenAI classes answer with a 400."""
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return
    wrong = next(token for token in ids if not 0 <= token < size)
    message = f"'{name}' has the token id {wrong}; the model has the ids 0 to {size - 1}."
    raise VLLMValidationError(message, parameter=name, value=wrong)


def guard(engine: Any) -> None:
    """Checks every request on its way from vLLM's input processor to the engine, whoever made it: text can become ids that only
    the tokenizer knows, and a resumed stream has the ids that another replica generated."""
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
