"""vLLM attention backend on paged_attention, flash_attention and kv_cache_write.

It uses vLLM's cache layout, [blocks, kv_heads, block_size, 2 * head_size] in the memory order chosen by the engine, so NIXL
transfers the same blocks as under vLLM's own backends. Steps are captured in full CUDA graphs, including steps that mix prompts
and decodes: everything that changes between replays is in tensors that vLLM updates in place, and each kernel selects its
requests on the GPU.

The keys of a long, uncached prompt are contiguous in the step's inputs, so attention need not read the cache. If a batch ends
with such requests (vLLM orders a batch by the tokens each request has in it), flash_attention processes them.

Without a graph, the host launches layer by layer, and for a small batch the launches dominate. paged_attention and kv_cache_write
are therefore called without torch's dispatcher and their argument checks, which would add half as much again. vLLM's surrounding
operators are opaque to torch anyway, and unsupported arguments are rejected when the engine starts.
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

from strata.kernels.ops.arrivals import zeroed_arrivals
from strata.kernels.ops.flash_attention.flash_attention import flash_attention
from strata.kernels.ops.fp8_cache import FP8
from strata.kernels.ops.kv_cache_write import kv_cache_write_cpu, kv_cache_write_triton
from strata.kernels.ops.paged_attention.paged_attention import (
    MOST_GROUP,
    MOST_HEAD_DIM,
    paged_attention_cpu,
    paged_attention_triton,
)
from strata.kernels.vllm_plugin.metadata import USE_VLLM_KERNELS, StrataAttentionMetadata, first_rows, metadata_of
from strata.kernels.vllm_plugin.switch import switched_on
from strata.kernels.vllm_plugin.warm_up import warm_up

HEAD_SIZE_STEP = 8  # so that heads are aligned for 16-byte loads
BLOCK_SIZES = (16, 32, 64, 128)
FP8_CACHES = ("fp8", "fp8_e4m3")
LEAST_FP8 = DeviceCapability(8, 9)  # GPUs that convert e4m3
LONG = 65536  # tokens times head size above which flash_attention is faster for an uncached prompt


class StrataAttentionBackend(AttentionBackend):  # type: ignore[misc]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the name vLLM's list of backends reserves for plugins

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
    def supports_combination(cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *more: Any) -> str | None:
        """Reason why a combination is unsupported, including what is supported; vLLM's own reasons omit that."""
        if not cls.supports_head_size(head_size):
            return f"head_size={head_size}: Strata's kernels support multiples of {HEAD_SIZE_STEP} up to {MOST_HEAD_DIM}"
        if kv_cache_dtype in FP8_CACHES:
            capability = more[-1]
            return None if capability >= LEAST_FP8 else f"kv_cache_dtype={kv_cache_dtype}: needs compute capability 8.9"
        if kv_cache_dtype not in (None, "auto", str(dtype).removeprefix("torch.")):
            return (
                f"kv_cache_dtype={kv_cache_dtype}: Strata's kernels need a cache in the model's dtype, {dtype}, or in fp8 (e4m3)"
            )
        return None

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        reasons = super().validate_configuration(*arguments, **named)
        return [*reasons, USE_VLLM_KERNELS] if reasons else []


class StrataAttentionMetadataBuilder(AttentionMetadataBuilder[StrataAttentionMetadata]):  # type: ignore[misc]
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.model_config.rswa_window is not None:
            raise NotImplementedError(f"Strata's kernels do not support reference sliding windows; {USE_VLLM_KERNELS}")
        self.long_prompt = LONG // kv_cache_spec.head_size if "flash_prefill" in switched_on() else None
        # Launches of one builder run in order, inside and outside graphs: if vLLM overlaps halves of a batch, each half has its
        # own builder.
        self.arrivals = zeroed_arrivals(vllm_config.scheduler_config.max_num_seqs * kv_cache_spec.num_kv_heads, device)
        if device.type == "cuda":
            warm_up(self)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StrataAttentionMetadata:
        return metadata_of(common_attn_metadata, self.long_prompt, self.arrivals)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> StrataAttentionMetadata:
        """The requests vLLM captures with look like uncached prompts, with as many keys as queries, but stand for any request. If
        graphs are not only for decodes, one request may have all the tokens, and paged_attention is sized by the longest. Most
        have the tokens of a decode step."""
        usual = None
        if self.vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            common_attn_metadata = common_attn_metadata.replace(max_query_len=common_attn_metadata.num_actual_tokens)
            usual = 1 + self.vllm_config.num_speculative_tokens
        return metadata_of(common_attn_metadata, None, self.arrivals, usual)


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
        for unsupported, name in ((alibi_slopes, "ALiBi"), (logits_soft_cap, "a soft cap of logits")):
            if unsupported:
                raise NotImplementedError(f"Strata's kernels do not support {name}; {USE_VLLM_KERNELS}")
        if num_heads // (num_kv_heads or num_heads) > MOST_GROUP:
            raise NotImplementedError(f"Strata's kernels support up to {MOST_GROUP} heads per KV head; {USE_VLLM_KERNELS}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.fp8 = kv_cache_dtype in FP8_CACHES
        self.attn_type = attn_type
        self.shares_cache = kv_sharing_target_layer_name is not None

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        tokens = slot_mapping.shape[0]
        write = kv_cache_write_triton if key.is_cuda else kv_cache_write_cpu
        write(first_rows(key, tokens), first_rows(value, tokens), *self._caches(kv_cache), slot_mapping, *self._scales(layer))

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,  # [tokens, heads, head_size], padded
        key: Tensor,  # [tokens, kv_heads, head_size]
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StrataAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"Strata's kernels do not quantise the output of attention; {USE_VLLM_KERNELS}")
        if attn_metadata is None:  # vLLM's memory profiling run
            return output.fill_(0)
        prompts = None if self.shares_cache else attn_metadata.prompts  # a layer that shares a cache attends to other keys
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
                *self._scales(layer),
            )
            if query.is_cuda:
                paged_attention_triton(*arguments, cached.arrivals, cached.usual_query_len)
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
        """Key and value caches as our kernels expect them: [blocks, block_size, kv_heads, head_size]."""
        kv_cache = kv_cache.view(FP8) if self.fp8 else kv_cache  # vLLM allocates bytes
        key_cache, value_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        return key_cache, value_cache

    def _scales(self, layer: AttentionLayer) -> tuple[Tensor | None, Tensor | None]:
        return (layer._k_scale, layer._v_scale) if self.fp8 else (None, None)
