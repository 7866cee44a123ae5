"""Tokens before the points of a chain."""

from typing import Any

import numpy as np
import pytest

from strata.serving.routing.kv import prefix_chain
from strata.serving.routing.kv.prefix_tokens import token_lengths, tokens_before

ONE = np.ones(300, dtype=np.int32)  # a token per byte


class Tokenizer:
    def __init__(self, *words: Any) -> None:
        self._words = words

    def __len__(self) -> int:
        return len(self._words)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]:
        return [self._words[number] for number in ids]


def chain(*texts: str) -> prefix_chain.Chain:
    found = prefix_chain.of("chat", {"messages": [{"role": "user", "content": text} for text in texts]}, "m")
    assert found is not None
    return found


def test_lengths_are_those_of_the_strings() -> None:
    assert token_lengths(Tokenizer("a", "abc", "", None), 6).tolist() == [1, 3, 1, 1, 1, 1]
    assert token_lengths(Tokenizer("a", "abc", "abcd"), 2).tolist() == [1, 3]


def test_template_text_is_spread_over_the_messages() -> None:
    found = chain("a" * 700, "b" * 200, "c" * 1000)
    rendered = [0] * (1900 + 35)  # 10 for each message, 5 for the answer's header
    counts = {point.position: count for point, count in zip(found.points, tokens_before(found, rendered, ONE), strict=True)}
    assert counts == {512: 512 + 5, 700: 700 + 10, 900: 900 + 20, 1412: 1412 + 25, 1900: 1900 + 30}


def test_longer_tokens_cover_more_text() -> None:
    """The first message has tokens of four bytes, the second of one."""
    found = chain("a" * 800, "b" * 800)
    lengths = np.array([4, 1], dtype=np.int32)
    tokens = [0] * 200 + [1] * 800
    counts = {point.position: count for point, count in zip(found.points, tokens_before(found, tokens, lengths), strict=True)}
    assert counts == {512: 128, 800: 200, 1312: 712, 1600: 1000}


@pytest.mark.parametrize("tokens", [700, 350])
def test_shorter_rendering_is_scaled(tokens: int) -> None:
    """Token strings without spaces, or a template that drops text."""
    found = chain("a" * 1400)
    assert tokens_before(found, [0] * tokens, ONE) == [512 * tokens // 1400, 1024 * tokens // 1400, tokens]


def test_ids_are_exact() -> None:
    found = prefix_chain.of("completions", {"prompt": list(range(200))}, "m")
    assert found is not None
    lengths = np.full(200, 3, dtype=np.int32)
    assert tokens_before(found, list(range(200)), lengths) == [64, 128, 192]


def test_unknown_ids_and_empty_prompts() -> None:
    found = chain("a" * 700)
    assert tokens_before(found, [10**6] * 700, ONE) == [512, 700]
    assert tokens_before(found, [], ONE) == []
    assert tokens_before(chain("short"), [1, 2], ONE) == []
