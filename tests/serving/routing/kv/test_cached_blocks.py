"""Blocks of an engine's cache by its events, and the prefixes that are announced with them."""

from typing import Any

from strata.serving.routing.kv.cached_blocks import CachedBlocks, Cleared, Removed, Salt, Stored
from strata.serving.routing.kv.prefix_log import MAX_PREFIXES, PrefixLog

NONE: Salt = (None, None)
B = 4


def blocks() -> CachedBlocks:
    return CachedBlocks(B, PrefixLog())


def stored(tokens: list[int], *hashes: bytes, parent: bytes | None = None, **more: Any) -> Stored:
    return Stored(list(hashes), parent, tokens, B, **more)


def test_nothing_is_cached_at_first() -> None:
    assert blocks().cached_tokens(list(range(20)), NONE) == 0


def test_leading_blocks_count_and_the_last_token_is_computed() -> None:
    index, tokens = blocks(), list(range(12))
    index.apply([stored(tokens, b"a", b"b", b"c")])
    for count, cached in ((13, 12), (12, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        assert index.cached_tokens([*tokens, 99][:count], NONE) == cached
    assert index.cached_tokens([0, 1, 2, 3, 99, 5, 6, 7, 8], NONE) == 4
    assert index.cached_tokens([9, *tokens[1:]], NONE) == 0


def test_block_is_the_same_only_behind_the_same_tokens() -> None:
    index = blocks()
    index.apply([stored([1, 2, 3, 4, 5, 6, 7, 8], b"a", b"b")])
    assert index.cached_tokens([5, 6, 7, 8, 5, 6, 7, 8, 0], NONE) == 0


def test_later_steps_continue_a_parent() -> None:
    index, tokens = blocks(), list(range(12))
    index.apply([stored(tokens[:4], b"a"), stored(tokens[4:], b"b", b"c", parent=b"a")])
    assert index.cached_tokens([*tokens, 0], NONE) == 12
    index.apply([stored([1, 2, 3, 4], b"z", parent=b"unknown")])  # an event before it is lost
    assert index.cached_tokens([1, 2, 3, 4, 0], NONE) == 0


def test_removal_ends_the_prefix_there() -> None:
    index, tokens = blocks(), list(range(13))
    index.apply([stored(tokens[:12], b"a", b"b", b"c"), Removed([b"b"])])
    assert index.cached_tokens(tokens, NONE) == 4
    index.apply([stored(tokens[4:8], b"b", parent=b"a")])
    assert index.cached_tokens(tokens, NONE) == 12, "the block behind it was still cached"


def test_block_is_cached_until_its_last_copy_is_removed() -> None:
    index, tokens = blocks(), list(range(5))
    first = stored(tokens[:4], b"a")
    index.apply([first, first, Removed([b"a"])])
    assert index.cached_tokens(tokens, NONE) == 4
    index.apply([Removed([b"a"]), Removed([b"a"]), Removed([b"never stored"])])
    assert index.cached_tokens(tokens, NONE) == 0
    index.apply([first])
    assert index.cached_tokens(tokens, NONE) == 4


def test_copy_in_another_tier_keeps_a_block() -> None:
    index, tokens = blocks(), list(range(5))
    index.apply([stored(tokens[:4], b"a"), stored([], b"a"), Removed([b"a"])])
    assert index.cached_tokens(tokens, NONE) == 4
    index.apply([Removed([b"a"])])
    assert index.cached_tokens(tokens, NONE) == 0


def test_salts_and_adapters_separate_blocks() -> None:
    index, tokens = blocks(), list(range(9))
    salts: list[Salt] = [NONE, ("s", None), (None, "lora"), ("s", "lora"), ("lora", None)]
    extra = [None, [["s"], None], [["lora"], ["lora"]], [["lora", "s"], ["lora"]], [["lora"], None]]
    for number, (salt, keys) in enumerate(zip(salts, extra, strict=True)):
        index.apply([Cleared()])
        name = salt[1]
        index.apply([stored(tokens[:8], b"a%d" % number, b"b%d" % number, lora_name=name, extra_keys=keys)])
        assert [index.cached_tokens(tokens, each) for each in salts] == [8 if each == salt else 0 for each in salts]


def test_blocks_with_pictures_have_no_name() -> None:
    index, tokens = blocks(), list(range(12))
    index.apply([stored(tokens[:4], b"a")])
    index.apply([stored(tokens[4:8], b"b", parent=b"a", extra_keys=[[["picture", 0]]])])
    index.apply([stored(tokens[8:], b"c", parent=b"b")])
    assert index.cached_tokens([*tokens, 0], NONE) == 4


def test_events_of_other_groups_and_sizes_are_ignored() -> None:
    index, tokens = blocks(), list(range(9))
    index.apply([stored(tokens[:4], b"a", group_idx=1), Stored([b"p"], None, tokens[:2], 2)])
    assert index.cached_tokens(tokens, NONE) == 0
    index.apply([stored(tokens[:4], b"a", group_idx=0), Removed([b"a"], group_idx=1)])
    assert index.cached_tokens(tokens, NONE) == 4


def test_prefixes_are_announced_while_their_last_block_is_cached() -> None:
    index, tokens = blocks(), list(range(12))
    index.register([(1, 3), (2, 4), (3, 7), (4, 9), (5, 12)], tokens, NONE)
    assert index.log.cached() == {}
    index.apply([stored(tokens[:8], b"a", b"b")])
    assert index.log.cached() == {2: 4, 3: 4, 4: 8}
    index.apply([stored(tokens[8:], b"c", parent=b"b")])
    assert index.log.cached() == {2: 4, 3: 4, 4: 8, 5: 12}
    index.apply([Removed([b"b"])])
    assert index.log.cached() == {2: 4, 3: 4, 5: 12}
    index.apply([Cleared()])
    assert index.log.cached() == {}


def test_prefix_of_cached_blocks_is_announced_at_once() -> None:
    index, tokens = blocks(), list(range(8))
    index.apply([stored(tokens, b"a", b"b")])
    index.register([(1, 5), (2, 8)], tokens, NONE)
    index.register([(3, 8)], tokens, ("salted", None))
    assert index.log.cached() == {1: 4, 2: 8}


def test_better_estimate_replaces_a_prefix() -> None:
    index, tokens = blocks(), list(range(8))
    index.apply([stored(tokens, b"a", b"b")])
    index.register([(1, 4)], tokens, NONE)
    index.register([(1, 8)], tokens, NONE)
    assert index.log.cached() == {1: 8}
    index.apply([Removed([b"b"])])
    assert index.log.cached() == {}


def test_memory_is_bounded_by_the_least_recently_used_prefixes() -> None:
    index, tokens = blocks(), list(range(4))
    index.apply([stored(tokens, b"a")])
    for digest in range(MAX_PREFIXES + 10):
        index.register([(0, 4), (digest, 4)], tokens, NONE)
    found = index.log.cached()
    assert len(found) == MAX_PREFIXES and 0 in found and MAX_PREFIXES + 9 in found and not set(range(1, 11)) & found.keys()
