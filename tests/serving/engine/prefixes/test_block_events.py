"""Index of an engine's cache by its events, beside vLLM's own block pool."""

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events
from vllm.distributed.kv_events import KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool

from strata.serving.routing.kv.cached_blocks import Batch, CachedBlocks, Cleared, Event, Removed, Stored
from strata.serving.routing.kv.prefix_log import PrefixLog

B = 4


@pytest.mark.parametrize("seed", range(5))
def test_index_has_what_vllms_pool_has(seed: int) -> None:
    """Random requests on vLLM's own block pool: after every event batch, both find the same prefixes."""
    draw, index = random.Random(seed), CachedBlocks(B, PrefixLog())
    kv_cache_utils.init_none_hash(sha256)
    pool = BlockPool(12, enable_caching=True, hash_block_size=B, enable_kv_cache_events=True)
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Batch).decode
    texts = [[draw.randrange(3) for _ in range(4 * B)] for _ in range(3)]
    for _ in range(60):
        base, salt, adapter = draw.choice(texts), draw.choice([None, "s"]), draw.choice([None, "lora"])
        tokens = base[: B * draw.randrange(1, 5)]
        lora = SimpleNamespace(name=adapter, lora_name=adapter, adapter_id=1) if adapter else None
        request: Any = SimpleNamespace(
            all_token_ids=tokens, num_tokens=len(tokens), lora_request=lora, cache_salt=salt, mm_features=[], prompt_embeds=None
        )
        request.block_hashes = []
        request.block_hashes = kv_cache_utils.get_request_block_hasher(B, sha256)(request)
        hits = 0
        held = []
        for hashed in request.block_hashes:
            found = pool.get_cached_block(hashed, [0])
            if not found:
                break
            held += found
            hits += 1
        assert index.cached_tokens([*tokens, 0], (salt, adapter)) == hits * B
        pool.touch(held)
        full = len(tokens) // B
        if full - hits <= pool.get_num_free_blocks():
            held += pool.get_new_blocks(full - hits)
            pool.cache_full_blocks(request, held, hits, full, B, 0)
        pool.free_blocks(reversed(held))
        batch = KVEventBatch(ts=0.0, events=pool.take_events())
        events: list[Event] = decode(encode(batch)).events
        index.apply(events)
    assert len(index._copies) == len(index._name_of) <= 12


def test_events_are_read_as_vllm_writes_them() -> None:
    made = [
        kv_events.BlockStored([b"h"], b"p", [1, 2, 3, 4], B, None, "GPU", "lora", [("lora",)], group_idx=0),
        kv_events.BlockRemoved([b"h"], "GPU", group_idx=0),
        kv_events.AllBlocksCleared(),
    ]
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, made, 0)), type=Batch)
    assert batch.events == [
        Stored([b"h"], b"p", [1, 2, 3, 4], B, "lora", [["lora"]], 0),
        Removed([b"h"], 0),
        Cleared(),
    ]
