"""Primes vLLM's incremental detokenizer with the last tokens of a prompt instead of the whole prompt.

The text of a token depends on the tokens before it: a leading space, or missing bytes of a character. vLLM therefore passes the
whole prompt to the tokenizers library, which decodes all of it when the first token is generated: 1 to 3 ms for 8,192 tokens,
in which no other stream of the replica advances. The last tokens of the prompt are sufficient.

Written for vLLM 0.29 and tokenizers 0.23. No longer needed when vLLM's `FastIncrementalDetokenizer` passes only the end of a
prompt to `DecodeStream`; the test of this file fails then.
"""

import tokenizers.decoders
from tokenizers.decoders import DecodeStream

TAIL = 256  # tokens: far more than the bytes of a character or the special tokens at the end of a chat template


def install() -> None:
    """Replaces the class for all streams of this process. vLLM looks it up in its module for every request."""
    tokenizers.decoders.DecodeStream = _stream  # type: ignore[assignment,misc]


def _stream(ids: list[int] | None = None, skip_special_tokens: bool = False) -> DecodeStream:
    return DecodeStream(ids=ids[-TAIL:] if ids else ids, skip_special_tokens=skip_special_tokens)
