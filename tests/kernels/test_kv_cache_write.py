"""kv_cache_write: the CPU implementation and the interpreted Triton kernel against the reference, bit for bit."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.kv_cache_write import kv_cache_write, kv_cache_write_cpu, kv_cache_write_triton, reference

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernel")
BOTH = [pytest.param(kv_cache_write_cpu, id="cpu"), pytest.param(kv_cache_write_triton, id="triton", marks=interpreted)]

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def assert_writes(
    write: Write, key: Tensor, value: Tensor, memory: Tensor, caches: Callable[[Tensor], Iterable[Tensor]], slots: Tensor
) -> None:
    """Checks that `write` equals the reference on `caches(memory)` and changes nothing else in the memory."""
    expected = memory.clone()
    reference(key, value, *caches(expected), slots)
    assert not torch.equal(memory, expected)
    write(key, value, *caches(memory), slots)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("write", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "tokens, heads, dim, block_size", [(1, 1, 1, 16), (3, 3, 80, 16), (127, 2, 16, 32), (129, 5, 3, 128), (9, 1, 1030, 16)]
)
def test_tokens_are_written_to_their_slots(
    write: Write, dtype: torch.dtype, tokens: int, heads: int, dim: int, block_size: int
) -> None:
    torch.manual_seed(tokens)
    key, value = torch.randn(2, tokens, heads, dim).to(dtype)
    memory = torch.randn(2, tokens // block_size + 2, block_size, heads, dim).to(dtype)
    slots = torch.randperm(memory.shape[1] * block_size)[:tokens]
    slots[1::5] = -1
    assert_writes(write, key, value, memory, lambda memory: memory, slots)


@pytest.mark.parametrize("write", BOTH)
@pytest.mark.parametrize(
    "shape, caches",
    [
        pytest.param((5, 2, 16, 2, 8), lambda memory: memory.unbind(1), id="key and value adjacent in a block"),
        pytest.param((2, 5, 2, 16, 8), lambda memory: memory.transpose(2, 3), id="heads first"),
        pytest.param((2, 5, 16, 2, 24), lambda memory: memory[..., 8:16], id="padding between heads"),
        pytest.param((9, 16, 3, 2, 8), lambda memory: memory[::2, :, ::2].unbind(2), id="every other block"),
    ],
)
def test_cache_strides(write: Write, shape: tuple[int, ...], caches: Callable[[Tensor], Iterable[Tensor]]) -> None:
    """Keys and values are slices of a packed projection."""
    packed = torch.randn(20, 3 * 2 * 8)
    key, value = (packed[:, part * 16 : (part + 1) * 16].view(20, 2, 8) for part in (1, 2))
    assert_writes(write, key, value, torch.randn(shape), caches, torch.randperm(5 * 16)[:20])


@pytest.mark.parametrize("write", BOTH)
def test_key_and_value_with_different_layouts(write: Write) -> None:
    key, value = torch.randn(6, 2, 8), torch.randn(2, 6, 8).transpose(0, 1)
    memory, slots = torch.randn(2, 5 * 16 * 2 * 8), torch.randperm(5 * 16)[:6]
    assert_writes(write, key, value, memory, lambda memory: memory.view(2, 5, 16, 2, 8), slots)

    def second_has_heads_first(memory: Tensor) -> Iterable[Tensor]:
        return memory[0].view(5, 16, 2, 8), memory[1].view(5, 2, 16, 8).transpose(1, 2)

    assert_writes(write, key, value, memory, second_has_heads_first, slots.flip(0))


@pytest.mark.parametrize("write", BOTH)
def test_nothing_to_write(write: Write) -> None:
    caches = torch.randn(2, 4, 16, 2, 8)
    before = caches.clone()
    write(torch.randn(0, 2, 8), torch.randn(0, 2, 8), caches[0], caches[1], torch.zeros(0, dtype=torch.int64))
    write(torch.randn(3, 2, 8), torch.randn(3, 2, 8), caches[0], caches[1], torch.full((3,), -1))
    assert torch.equal(caches, before)


def test_slot_beyond_the_cache_is_an_error_on_a_cpu() -> None:
    key, value = torch.randn(2, 3, 2, 8)
    caches = torch.zeros(2, 4, 16, 2, 8)
    slots = torch.tensor([5, 64, 6])
    with pytest.raises(ValueError, match="slot 64 is beyond the cache of 4 blocks of 16"):
        kv_cache_write(key, value, caches[0], caches[1], slots)
    assert not caches.any()


@interpreted
def test_triton_skips_slots_beyond_the_cache() -> None:
    key, value = torch.randn(2, 3, 2, 8)
    caches = torch.zeros(2, 5, 16, 2, 8)
    kv_cache_write_triton(key, value, caches[0, :4], caches[1, :4], torch.tensor([5, 64, 2**40]))
    assert torch.equal(caches[0, 0, 5], key[0]) and int(caches.any(-1).any(-1).sum()) == 2


@pytest.mark.slow
def test_opcheck_and_compile() -> None:
    key, value = torch.randn(2, 3, 2, 8)
    key_cache, value_cache = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8)
    slots = torch.tensor([5, -1, 40])
    torch.library.opcheck(torch.ops.strata.kv_cache_write.default, (key, value, key_cache, value_cache, slots))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(key: Tensor, value: Tensor) -> Tensor:
        kv_cache_write(key * 2, value, key_cache, value_cache, slots)
        return key_cache.sum()

    total = step(key, value)
    assert torch.equal(key_cache[0, 5], key[0] * 2) and torch.equal(value_cache[2, 8], value[2])
    assert total.item() == pytest.approx(2 * (key[0] + key[2]).sum().item(), abs=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key": torch.zeros(3, 16)}, r"key and value \[tokens, heads, dim\].*got \[3, 16\], \[3, 2, 8\] and \[3\]"),
        ({"value": torch.zeros(3, 2, 4)}, r"\[3, 2, 4\]"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"and \[2\]"),
        ({"key_cache": torch.zeros(4, 16, 1, 8)}, r"heads and dim of the key \[3, 2, 8\], got \[4, 16, 1, 8\]"),
        ({"value_cache": torch.zeros(4, 16, 2, 8).half()}, "one dtype, float32, float16 or bfloat16.*float16"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "contiguous int64 slots, got torch.int32"),
        ({"slots": torch.zeros(6, dtype=torch.int64)[::2]}, r"with stride \(2,\)"),
        ({"key_cache": torch.zeros(4, 16, 8, 2).mT}, "last dimension is contiguous"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Tensor], message: str) -> None:
    caches = {name: torch.zeros(4, 16, 2, 8) for name in ("key_cache", "value_cache")}
    tokens = {name: torch.zeros(3, 2, 8) for name in ("key", "value")}
    arguments: dict[str, Any] = {**tokens, **caches, "slots": torch.zeros(3, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        kv_cache_write(**arguments)
