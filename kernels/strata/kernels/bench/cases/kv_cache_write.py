"""kv_cache_write of a decode step and of prompts up to 16k tokens, into scattered blocks, against vLLM's kernel."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from strata.kernels.bench.case import OURS, Case, Contest, Missing
from strata.kernels.ops.kv_cache_write import kv_cache_write

HEADS, HEAD_DIM = 8, 128

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]


def cases() -> list[Case]:
    shapes = [(1, 16), (32, 16), (256, 16), (2048, 16), (16384, 16), (16384, 128)]
    return [
        Case("kv_cache_write", f"{tokens} tokens, blocks of {block_size}", partial(_contest, tokens, block_size))
        for tokens, block_size in shapes
    ]


def _contest(tokens: int, block_size: int, device: torch.device) -> Contest:
    key, value = (torch.randn(tokens, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    blocks = 2 * (tokens // block_size + 1)
    slots = torch.randperm(blocks, device=device)[: blocks // 2, None] * block_size + torch.arange(block_size, device=device)
    slots = slots.flatten()[:tokens]

    def run(write: Write, caches: Tensor) -> tuple[Tensor, Tensor]:
        write(key, value, caches[0], caches[1], slots)
        return caches[0], caches[1]

    def caches() -> Tensor:
        return torch.zeros(2, blocks, block_size, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)

    vllm = _vllm()
    return Contest(
        contenders={
            OURS: partial(run, kv_cache_write, caches()),
            "torch eager": partial(run, _eager, caches()),
            "torch.compile": partial(run, torch.compile(_eager, dynamic=False), caches()),
            "vLLM": vllm if isinstance(vllm, Missing) else partial(run, vllm, caches()),
        },
        reference=partial(run, _eager, caches()),
        tolerance=0.0,
        bytes=2 * (key.nbytes + value.nbytes) + slots.nbytes,
    )


def _eager(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


def _vllm() -> Write | Missing:
    try:
        from vllm._custom_ops import reshape_and_cache_flash
    except ImportError:
        return Missing("vLLM is not installed")
    one = torch.ones((), device="cuda") if torch.cuda.is_available() else torch.ones(())

    def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", one, one)

    return write
