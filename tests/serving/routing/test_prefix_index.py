import random

from support import within

from strata.serving.routing.prefix_index import PrefixIndex

RNG = random.Random(3)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(128_000) for _ in range(count)]


def test_empty_index_has_no_cached_tokens() -> None:
    assert PrefixIndex(16, 100).cached_tokens(tokens(100)) == 0


def test_full_blocks_of_a_shared_prefix_are_cached() -> None:
    index = PrefixIndex(16, 100)
    shared = tokens(50)
    index.add(shared + tokens(30))
    assert index.cached_tokens(shared + tokens(30)) == 48
    assert index.cached_tokens(shared[:20]) == 16
    assert index.cached_tokens(shared[:15]) == 0


def test_the_last_token_is_always_computed() -> None:
    index = PrefixIndex(16, 100)
    prompt = tokens(64)
    index.add(prompt)
    assert index.cached_tokens(prompt) == 48
    assert index.cached_tokens([*prompt, 1]) == 64
    assert index.cached_tokens([]) == 0


def test_block_matches_only_after_the_same_prefix() -> None:
    index = PrefixIndex(4, 100)
    index.add([1, 2, 3, 4, 5, 6, 7, 8])
    assert index.cached_tokens([9, 2, 3, 4, 5, 6, 7, 8, 0]) == 0
    assert index.cached_tokens([5, 6, 7, 8, 0]) == 0


def test_answer_is_cached_for_the_next_request() -> None:
    index = PrefixIndex(16, 100)
    prompt, answer = tokens(40), tokens(40)
    index.add(prompt)
    index.add(prompt + answer[:-1])
    assert index.cached_tokens(prompt + answer + tokens(20)) == 64


def test_eviction_is_least_recently_used_and_from_the_end() -> None:
    index = PrefixIndex(4, 6)
    first, second, third = tokens(16), tokens(8), tokens(8)
    index.add(first)
    index.add(second)
    index.add(third)  # two blocks too many: the end of the first goes
    assert index.cached_tokens([*first, 0]) == 8
    index.add(first[:8])  # used again
    index.add(tokens(8))
    assert index.cached_tokens([*first, 0]) == 8
    assert index.cached_tokens([*second, 0]) == 0
    assert index.cached_tokens([*third, 0]) == 8


def test_cached_tokens_never_exceed_the_capacity() -> None:
    index = PrefixIndex(4, 10)
    prompt = tokens(400)
    index.add(prompt)
    assert index.cached_tokens(prompt) == 40


def test_lookup_of_a_long_prompt_is_fast() -> None:
    """A lookup measured 0.4 ms when this was written."""
    index = PrefixIndex(16, 10_000)
    prompt = tokens(8000)
    index.add(prompt)
    with within(20 * 0.002):
        for _ in range(20):
            index.cached_tokens(prompt)
