"""Estimate of a request's sequences and tokens before it runs. The tokens are corrected when it has ended.

The gateway has no tokenizer. Prompts of token ids are counted; text counts a token per four bytes of the request, and an image a
fixed number.
"""

from dataclasses import dataclass
from typing import Any, TypeGuard

from strata.serving.api.limits import MAX_SEQUENCES
from strata.serving.api.requests import dicts

BYTES_PER_TOKEN = 4
IMAGE_TOKENS = 1024
DEFAULT_OUTPUT = 256  # tokens of an answer without a limit
OUTPUT_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


@dataclass(frozen=True)
class Estimate:
    sequences: int
    input: int  # tokens
    output: int

    @property
    def tokens(self) -> int:
        return self.input + self.output


def estimate(tree: dict[str, Any], body_bytes: int, context: int | None) -> Estimate:
    """`context` bounds the answer, if it is known. Invalid parameters count as absent ones; the replica refuses them."""
    _, ids = _prompts(tree.get("prompt"))
    sequences = sequences_of(tree)
    longest = next((tree[name] for name in OUTPUT_LIMITS if _natural(tree.get(name))), DEFAULT_OUTPUT)
    if context is not None:
        longest = min(longest, context)
    images, image_bytes = _images(tree.get("messages"))
    text = -(-(body_bytes - image_bytes) // BYTES_PER_TOKEN) + images * IMAGE_TOKENS
    return Estimate(sequences, ids if ids is not None else text, longest * sequences)


def sequences_of(tree: dict[str, Any]) -> int:
    """Sequences that a request runs: each prompt `n` times."""
    n = tree.get("n")
    each = n if _natural(n) and n <= MAX_SEQUENCES else 1
    return min(each * _prompts(tree.get("prompt"))[0], MAX_SEQUENCES)


def _prompts(prompt: Any) -> tuple[int, int | None]:
    """Number of prompts, and of their token ids; None for text."""
    if not isinstance(prompt, list) or not prompt:
        return 1, None
    if isinstance(prompt[0], int):
        return 1, len(prompt)
    lengths = [len(each) for each in prompt if isinstance(each, list)]
    return len(prompt), sum(lengths) if len(lengths) == len(prompt) else None


def _images(messages: Any) -> tuple[int, int]:
    """Number of the images in a conversation, and the bytes of their addresses."""
    parts = [part for message in dicts(messages) for part in dicts(message.get("content"))]
    urls = [part["image_url"].get("url") for part in parts if isinstance(part.get("image_url"), dict)]
    return len(urls), sum(len(url) for url in urls if isinstance(url, str) and url.isascii())


def _natural(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
