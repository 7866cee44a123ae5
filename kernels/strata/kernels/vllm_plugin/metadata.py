"""Metadata of an attention batch, and of the uncached prompts at its end, which flash_attention can process."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

USE_VLLM_KERNELS = "set serve.kernels: vllm for this model"


@dataclass
class StrataAttentionMetadata(AttentionMetadata):  # type: ignore[misc]
    """Uses vLLM's field names, because vLLM reads them too. The tokens of all requests are concatenated."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [requests + 1]
    max_seq_len: int
    seq_lens: Tensor  # int32 [requests], cached tokens included
    block_table: Tensor  # int32 [requests, blocks]
    slot_mapping: Tensor  # int64 [tokens]
    arrivals: Tensor | None  # paged_attention's counters, reused from launch to launch
    prompts: "WholePrompts | None" = None
    usual_query_len: int | None = None  # where max_query_len is only a bound


@dataclass(frozen=True)
class WholePrompts:
    """Requests at the end of a batch with no cached tokens."""

    before: StrataAttentionMetadata | None  # the other requests
    first_token: int
    starts: Tensor  # int32 [prompts + 1], relative to `first_token`
    longest: int


def metadata_of(
    common: CommonAttentionMetadata,
    long_prompt: int | None,
    arrivals: Tensor | None = None,
    usual_query_len: int | None = None,
) -> StrataAttentionMetadata:
    """`long_prompt` is the prompt length from which flash_attention processes uncached prompts; None disables it."""
    if common.causal is not True:
        raise NotImplementedError(f"Strata's kernels serve causal attention only; {USE_VLLM_KERNELS}")
    batch = StrataAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=first_rows(common.query_start_loc, common.num_reqs + 1),
        max_seq_len=common.max_seq_len,
        seq_lens=first_rows(common.seq_lens, common.num_reqs),
        block_table=first_rows(common.block_table_tensor, common.num_reqs),
        slot_mapping=common.slot_mapping,
        arrivals=arrivals,
        usual_query_len=usual_query_len,
    )
    if long_prompt is not None and common.max_query_len >= long_prompt and common.seq_lens_cpu_upper_bound is not None:
        batch.prompts = _whole_prompts(common, batch, long_prompt)
    return batch


def _whole_prompts(common: CommonAttentionMetadata, batch: StrataAttentionMetadata, least: int) -> WholePrompts | None:
    """Decided from host-side metadata: reading the GPU would synchronize."""
    requests = common.num_reqs
    starts = common.query_start_loc_cpu[: requests + 1].numpy()
    queries, keys = np.diff(starts), common.seq_lens_cpu_upper_bound[:requests].numpy()
    (others,) = np.nonzero((queries != keys) | (queries < least))
    first = int(others[-1]) + 1 if len(others) else 0
    if first == requests:
        return None
    first_token = int(starts[first])
    before = None
    if first:
        before = StrataAttentionMetadata(
            num_actual_tokens=first_token,
            max_query_len=int(queries[:first].max()),
            query_start_loc=batch.query_start_loc[: first + 1],
            max_seq_len=int(keys[:first].max()),
            seq_lens=batch.seq_lens[:first],
            block_table=batch.block_table[:first],
            slot_mapping=batch.slot_mapping[:first_token],
            arrivals=batch.arrivals,
        )
    prompts = batch.query_start_loc[first:]
    return WholePrompts(before, first_token, prompts - first_token if first else prompts, int(queries[first:].max()))


def first_rows(rows: Tensor, wanted: int) -> Tensor:
    """`rows` without vLLM's padding. Compares first, because a slice costs more than a comparison."""
    return rows if rows.shape[0] == wanted else rows[:wanted]
