"""Limits on request parameters that vLLM accepts but fails on, stalls on, or that let one client delay all others.

Found by testing vLLM 0.29. Parameters that vLLM itself refuses with a 400 are not repeated here.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from strata.serving.api.requests import INT64, ApiError

MAX_SEQUENCES = 128  # per request, over all prompts
MAX_BEAMS = 10  # beam search requests twice as many logprobs, and vLLM's maximum is 20
MAX_LENGTH_PENALTY = 10  # an exponent: beyond a few hundred it overflows a float, and vLLM fails
MAX_STOP_CHARACTERS = 1024  # a stream holds back this much text until it cannot match the stop string
MAX_BAD_WORD_CHARACTERS = 8192  # tokenized twice while every stream of this replica waits: a megabyte needs 8 s
MAX_REPETITION_PATTERN = 256  # each token is compared with this many patterns, in the engine's loop
MAX_TOKEN_ID = 2**31 - 1  # the tokenizer fails on larger ids
MAX_TOKENIZE_BYTES = 2**20  # prompts queue behind it for tokenization: a megabyte needs 1 s

# These masks, combined with a grammar's, can leave no token, and vLLM then fails. No other pair of masks can.
AGAINST_A_GRAMMAR = ("allowed_token_ids", "bad_words", "min_tokens")

# Arguments that vLLM passes to the template by name. A duplicate would raise a TypeError instead of a 400.
RENDERER_ARGUMENTS = frozenset({"model_config", "tokenizer", "conversation", "messages", "tools", "chat_template", "tokenize"})


def check(request: Any, max_sequences: int) -> None:
    """Checks a completion or chat request."""
    _numbers(request)
    _text(request)
    _sequences(request, max_sequences)
    for name in AGAINST_A_GRAMMAR if is_structured(request) else ():
        if getattr(request, name, None):
            raise ApiError(400, f"'{name}' cannot be combined with structured output.", param=name)
    _template(request)


def check_tokenizing(request: Any, body_bytes: int) -> None:
    """Checks a request to tokenize or detokenize, for which vLLM has no limit."""
    if body_bytes > MAX_TOKENIZE_BYTES:
        raise ApiError(
            400, f"At most {MAX_TOKENIZE_BYTES} bytes can be tokenized per request; {body_bytes} were sent.", param="prompt"
        )
    _numbers(request)
    _template(request)


def _template(request: Any) -> None:
    if clash := RENDERER_ARGUMENTS & (getattr(request, "chat_template_kwargs", None) or {}).keys():
        raise ApiError(400, f"'chat_template_kwargs' must not have '{min(clash)}'.", param="chat_template_kwargs")


def _numbers(request: Any) -> None:
    """Refuses non-finite and oversized numbers. The JSON parser does, but pydantic converts strings: "nan", or any integer."""
    for name in type(request).model_fields:
        if name in ("prompt", "messages", "tools"):  # token ids are compared with the vocabulary later
            continue
        for number in _within(getattr(request, name)):
            if isinstance(number, float) and not math.isfinite(number):
                raise ApiError(400, f"'{name}' must be finite.", param=name)
            if isinstance(number, int) and number not in INT64:
                raise ApiError(400, f"'{name}' has a number beyond 64 bits.", param=name)
    if max(getattr(request, "tokens", None) or [0]) > MAX_TOKEN_ID:
        raise ApiError(400, f"'tokens' must be at most {MAX_TOKEN_ID}.", param="tokens")
    if abs(getattr(request, "length_penalty", 0)) > MAX_LENGTH_PENALTY:
        message = f"'length_penalty' must be between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}."
        raise ApiError(400, message, param="length_penalty")
    repetition = getattr(request, "repetition_detection", None)
    if repetition is not None and repetition.max_pattern_size > MAX_REPETITION_PATTERN:
        message = f"'max_pattern_size' must be at most {MAX_REPETITION_PATTERN}."
        raise ApiError(400, message, param="repetition_detection")


def _within(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list):
        yield from (entry for entry in value if isinstance(entry, int | float))
    elif isinstance(value, dict):
        yield from (entry for entry in value.values() if isinstance(entry, int | float))
    elif is_dataclass(value):
        for field in fields(value):
            yield from _within(getattr(value, field.name))


def _text(request: Any) -> None:
    stop = getattr(request, "stop", None) or []
    if max(map(len, [stop] if isinstance(stop, str) else stop), default=0) > MAX_STOP_CHARACTERS:
        raise ApiError(400, f"A stop string may have at most {MAX_STOP_CHARACTERS} characters.", param="stop")
    if sum(map(len, getattr(request, "bad_words", None) or [])) > MAX_BAD_WORD_CHARACTERS:
        message = f"'bad_words' may have at most {MAX_BAD_WORD_CHARACTERS} characters in total."
        raise ApiError(400, message, param="bad_words")


def _sequences(request: Any, max_sequences: int) -> None:
    n = getattr(request, "n", None) or 1
    beams = getattr(request, "use_beam_search", False)
    most = min(MAX_BEAMS if beams else MAX_SEQUENCES, max_sequences)
    if n > most:
        raise ApiError(400, f"'n' must be at most {most}{' with beam search' if beams else ''}.", param="n")
    if beams and getattr(request, "echo", False) and getattr(request, "logprobs", None) is not None:
        # Beam search has no prompt logprobs, and vLLM fails on them.
        raise ApiError(400, "'echo' with 'logprobs' is not possible with beam search.", param="echo")
    prompt = getattr(request, "prompt", None)
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if n * prompts > MAX_SEQUENCES:
        message = f"{prompts} prompts with n={n} are {n * prompts} sequences; a request may have at most {MAX_SEQUENCES}."
        raise ApiError(400, message, param="prompt")


def is_structured(request: Any) -> bool:
    wanted = getattr(request, "response_format", None) or getattr(getattr(request, "text", None), "format", None)
    return getattr(request, "structured_outputs", None) is not None or (wanted is not None and wanted.type != "text")
