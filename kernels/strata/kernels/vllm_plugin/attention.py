"""An attention backend for vLLM on our paged_attention, flash_attention and kv_cache_write.

It reads and writes vLLM's cache as vLLM lays it out, [blocks, kv_heads, block_size, 2 * head_size] in whatever order of memory
the engine settled on, so an engine's blocks mean the same to NIXL as under vLLM's own backends. Steps are captured in full CUDA
graphs, also those that mix prompts and streams: all that changes between two replays lies in tensors that vLLM keeps in place,
and which request is done by which kernel is found out on the GPU.

Long requests that are whole prompts have their keys at hand, in a row, and need not look into the cache. A batch that ends with
such requests (vLLM sorts a batch by how much of each request it holds) may have them done by flash_attention.

Without a graph the host launches layer by layer, and of a small batch that is what takes the time. So paged_attention and
kv_cache_write are called behind torch's dispatcher and their own checks, which cost half as much again: vLLM's operators around
this are opaque to torch anyway, and what could be wrong is refused when the engine starts.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from strata.kernels.ops.flash_attention.flash_attention import flash_attention
from strata.kernels.ops.kv_cache_write import kv_cache_write_cpu, kv_cache_write_triton
from strata.kernels.ops.paged_attention.decode import no_arrivals
from strata.kernels.ops.paged_attention.paged_attention import (
    MOST_GROUP,
    MOST_HEAD_DIM,
    paged_attention_cpu,
    paged_attention_triton,
)
from strata.kernels.vllm_plugin.metadata import INSTEAD, StrataAttentionMetadata, first_rows, metadata_of
from strata.kernels.vllm_plugin.switch import switched_on
from strata.kernels.vllm_plugin.warm_up import warm_up

HEAD_SIZE_STEP = 8  # so that heads begin where 16 bytes can be read at once
BLOCK_SIZES = (16, 32, 64, 128)
LONG = 65536  # tokens times head size from which on a whole prompt is quicker by flash_attention


class StrataAttentionBackend(AttentionBackend):  # type: ignore[misc]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up in its list of backends, where this place is kept for others'

    @staticmethod
    def get_impl_cls() -> type["StrataAttentionImpl"]:
        return StrataAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["StrataAttentionMetadataBuilder"]:
        return StrataAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return list(BLOCK_SIZES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= MOST_HEAD_DIM and head_size % HEAD_SIZE_STEP == 0

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return bool(capability >= DeviceCapability(8, 0))

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        """vLLM's own reasons say what is not supported; this one also says what is."""
        if not cls.supports_head_size(head_size):
            return f"head_size={head_size}: Strata's kernels take multiples of {HEAD_SIZE_STEP} up to {MOST_HEAD_DIM}"
        if kv_cache_dtype not in (None, "auto", str(dtype).removeprefix("torch.")):
            return f"kv_cache_dtype={kv_cache_dtype}: Strata's kernels keep the cache in the model's dtype, {dtype}"
        return None

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        reasons = super().validate_configuration(*arguments, **named)
        return [*reasons, INSTEAD] if reasons else []


class StrataAttentionMetadataBuilder(AttentionMetadataBuilder[StrataAttentionMetadata]):  # type: ignore[misc]
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.model_config.rswa_window is not None:
            raise NotImplementedError(f"Strata's kernels do not know reference sliding windows; {INSTEAD}")
        self.long_prompt = LONG // kv_cache_spec.head_size if "flash_prefill" in switched_on() else None
        # A builder's launches come one after the other, in graphs and between them: where vLLM overlaps halves of a batch, each
        # half has a builder of its own.
        self.arrivals = no_arrivals(vllm_config.scheduler_config.max_num_seqs * kv_cache_spec.num_kv_heads, device)
        if device.type == "cuda":
            warm_up(self)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StrataAttentionMetadata:
        return metadata_of(common_attn_metadata, self.long_prompt, self.arrivals)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> StrataAttentionMetadata:
        """Its requests look like whole prompts, with as many keys as queries, and stand for others that are not. Where graphs are
        not for decodes alone they also stand for one request that has all the tokens: paged_attention goes by the longest."""
        if self.vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            common_attn_metadata = common_attn_metadata.replace(max_query_len=common_attn_metadata.num_actual_tokens)
        return metadata_of(common_attn_metadata, None, self.arrivals)


class StrataAttentionImpl(AttentionImpl[StrataAttentionMetadata]):  # type: ignore[misc]
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        for asked, name in ((alibi_slopes, "ALiBi"), (logits_soft_cap, "a soft cap of logits")):
            if asked:
                raise NotImplementedError(f"Strata's kernels do not know {name}; {INSTEAD}")
        if num_heads // (num_kv_heads or num_heads) > MOST_GROUP:
            raise NotImplementedError(f"Strata's kernels take up to {MOST_GROUP} heads for each KV head; {INSTEAD}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.shares_cache = kv_sharing_target_layer_name is not None

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        tokens = slot_mapping.shape[0]
        write = kv_cache_write_triton if key.is_cuda else kv_cache_write_cpu
        write(first_rows(key, tokens), first_rows(value, tokens), *self._caches(kv_cache), slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,  # [tokens, heads, head_size], padded beyond the batch's
        key: Tensor,  # [tokens, kv_heads, head_size]
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StrataAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"Strata's kernels do not quantise attention's output; {INSTEAD}")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        prompts = None if self.shares_cache else attn_metadata.prompts  # the keys at hand are not those it attends to
        cached = attn_metadata if prompts is None else prompts.before
        if cached is not None:
            arguments = (
                first_rows(query, cached.num_actual_tokens),
                *self._caches(kv_cache),
                cached.block_table,
                cached.seq_lens,
                cached.query_start_loc,
                first_rows(output, cached.num_actual_tokens),
                cached.max_query_len,
                cached.max_seq_len,
                self.scale,
                self.window or 0,
            )
            if query.is_cuda:
                paged_attention_triton(*arguments, cached.arrivals)
            else:
                paged_attention_cpu(*arguments)
        if prompts is not None:
            tokens = slice(prompts.first_token, attn_metadata.num_actual_tokens)
            attended = flash_attention(
                query[None, tokens],
                key[None, tokens],
                value[None, tokens],
                scale=self.scale,
                window=self.window,
                cu_seqlens=prompts.starts,
                max_seqlen=prompts.longest,
            )
            output[tokens] = attended[0]
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """As our kernels take them: each [blocks, block_size, kv_heads, head_size]."""
        key_cache, value_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        return key_cache, value_cache
