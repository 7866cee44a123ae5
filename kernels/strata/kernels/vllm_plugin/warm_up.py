"""Compiles the attention kernels while the engine starts, so that no request waits for Triton.

A few batches cover all variants: kernels are specialised on the number of requests and on the queries per request, both rounded
up. The number of cached tokens is a runtime value.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata

from strata.kernels.compiler.ahead import compile_ahead
from strata.kernels.compiler.warm_up import sizes
from strata.kernels.vllm_plugin.metadata import metadata_of

Batch = list[tuple[int, int]]  # (cached tokens, new tokens) of each request

CACHED = 300  # cached tokens of a running request; any number
REQUESTS = (1, 33, 257, 513, 1025)  # each is the first request count of a larger kernel variant
QUERIES = (1, 2, 4, 8, 16, 64, 2048)  # decodes, then prompt chunks; chunks of few tokens use smaller tiles
LONGEST = 16384  # longer prompts use the kernels for this length


def warm_up(builder: AttentionMetadataBuilder) -> None:
    """Warms up `builder`, an `attention.StrataAttentionMetadataBuilder`, which calls this function."""
    began = time.monotonic()
    layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names).values()
    distinct = {(layer.impl.num_heads, layer.impl.scale, layer.impl.window): layer.impl for layer in layers}
    dtype = builder.vllm_config.model_config.dtype
    scheduler, spec = builder.vllm_config.scheduler_config, builder.kv_cache_spec
    batches = list(_batches(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, builder.long_prompt))
    with torch.inference_mode():
        kernels = compile_ahead(
            call
            for layer in distinct.values()
            for call in calls(layer, batches, spec.block_size, dtype, spec.dtype, builder.long_prompt, builder.device)
        )
    init_logger("vllm.strata").info("Strata attention: compiled %d kernels in %.1f s", kernels, time.monotonic() - began)


def calls(
    layer: AttentionImpl,
    batches: Sequence[Batch],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    long_prompt: int | None,
    device: torch.device,
) -> Iterator[Callable[[], Any]]:
    empty = partial(torch.empty, dtype=dtype, device=device)
    cache = empty(2, layer.num_kv_heads, block_size, 2 * layer.head_size, dtype=cache_dtype)
    one = torch.ones((), device=device)
    scales = SimpleNamespace(_k_scale=one, _v_scale=one)  # a layer's, which fp8 caches need
    most_tokens = max(sum(new for _, new in batch) for batch in batches)
    keys = empty(most_tokens, layer.num_kv_heads, layer.head_size)
    for tokens in sizes(most_tokens):
        slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        yield partial(layer.do_kv_cache_update, scales, keys[:tokens], keys[:tokens], cache, slots)
    for batch in batches:
        common = _described(batch, block_size, device)
        key, query = keys[: common.num_actual_tokens], empty(common.num_actual_tokens, layer.num_heads, layer.head_size)
        yield partial(layer.forward, scales, query, key, key, cache, metadata_of(common, long_prompt), torch.empty_like(query))


def _batches(most_tokens: int, most_requests: int, long_prompt: int | None) -> Iterator[Batch]:
    for requests in REQUESTS:
        decodes = [(CACHED, 1)] * (requests - 1)
        for queries in QUERIES:
            if requests <= most_requests and requests - 1 + queries <= most_tokens:
                yield [*decodes, (CACHED, queries)]
    if long_prompt is not None and long_prompt <= most_tokens:
        yield from ([(0, length)] for length in sizes(min(most_tokens, LONGEST)) if length >= long_prompt)
        yield [(0, long_prompt)] * min(most_tokens // long_prompt, most_requests)
    yield [(CACHED, most_tokens)]


def _described(batch: Batch, block_size: int, device: torch.device) -> CommonAttentionMetadata:
    new = [more for _, more in batch]
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    lengths = torch.tensor([old + more for old, more in batch], dtype=torch.int32)
    most = max(lengths.tolist())
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(batch),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=most,
        block_table_tensor=torch.zeros(len(batch), -(-most // block_size), dtype=torch.int32, device=device),
        slot_mapping=torch.full((sum(new),), -1, dtype=torch.int64, device=device),
    )
