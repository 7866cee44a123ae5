"""Prefixes of requests on a replica: registered with the prompt, extended by the answer."""

from typing import Any

import numpy as np

from strata.serving.engine.prefixes import Prefixes
from strata.serving.engine.request_context import RequestContext
from strata.serving.routing.kv import prefix_chain
from strata.serving.routing.kv.cached_blocks import CachedBlocks, Stored
from strata.serving.routing.kv.prefix_log import PrefixLog

B = 16
NONE = (None, None)
ONE = np.ones(10, dtype=np.int32)
TREE: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 700}]}


def replica() -> tuple[Prefixes, PrefixLog]:
    log = PrefixLog()
    return Prefixes(CachedBlocks(B, log), ONE), log


def store(prefixes: Prefixes, tokens: list[int]) -> None:
    full = len(tokens) // B
    assert prefixes.blocks is not None
    prefixes.blocks.apply([Stored([b"%d" % number for number in range(full)], None, tokens[: full * B], B)])


def context(resumed: tuple[int, ...] = ()) -> RequestContext:
    return RequestContext(resumed=resumed, chain=prefix_chain.of("chat", TREE, "m"))


def digests(tree: dict[str, Any]) -> list[int]:
    found = prefix_chain.of("chat", tree, "m")
    assert found is not None
    return [point.digest for point in found.points]


def test_next_turn_finds_prompt_and_answer() -> None:
    prefixes, log = replica()
    request, prompt = context(), [1] * 700
    prefixes.register_prompt(request, {"prompt_token_ids": prompt}, NONE)
    request.answer, request.generated = ["y" * 100, "y" * 100], [2] * 200
    prefixes.register_answer(request, {"prompt_token_ids": prompt}, NONE)
    store(prefixes, [*prompt, *request.generated[:-1]])
    following = TREE["messages"] + [{"role": "assistant", "content": "y" * 200}, {"role": "user", "content": "z" * 700}]
    found = [log.cached().get(digest) for digest in digests({"messages": following})]
    assert found[:3] == [512, 688, 896] and len(found) == 5 and not any(found[3:])  # of 512, 700 and 899 tokens


def test_resumed_tokens_are_no_part_of_the_prompt() -> None:
    prefixes, log = replica()
    request = context(resumed=(3,) * 100)
    prompt = [1] * 700 + [3] * 100
    prefixes.register_prompt(request, {"prompt_token_ids": prompt}, NONE)
    store(prefixes, prompt)
    assert list(log.cached().values()) == [512, 688]


def test_requests_without_chain_or_index_are_not_registered() -> None:
    prefixes, log = replica()
    prefixes.register_prompt(RequestContext(), {"prompt_token_ids": [1] * 700}, NONE)
    prefixes.register_answer(RequestContext(), {}, NONE)
    prefixes.register_prompt(context(), {}, NONE)  # a prompt without ids
    store(prefixes, [1] * 700)
    assert log.cached() == {}
    for blind in (Prefixes(), Prefixes(CachedBlocks(B, log))):
        blind.register_prompt(context(), {"prompt_token_ids": [1] * 700}, NONE)
        blind.register_answer(context(), {"prompt_token_ids": [1] * 700}, NONE)
    assert log.cached() == {} and Prefixes().cached_tokens([1] * 700, NONE) == 0
    assert prefixes.cached_tokens([1] * 700, NONE) == 688
