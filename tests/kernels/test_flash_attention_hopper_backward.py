"""Hopper backward pass: its two Triton kernels in the interpreter, and the machine code of its Gluon kernel."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.flash_attention import hopper_backward as hopper

pytestmark = pytest.mark.slow

COMPILE = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from strata.kernels.ops.flash_attention import hopper_backward as hopper

triton.knobs.nvidia.dump_ptxas_log = True  # prints ptxas's report of registers, spills and serialised wgmma
kernel = hopper.backward_kernel
names = kernel.arg_names
for e, causal, windowed, packed in ((128, True, False, False), (64, True, True, True)):
    tile, statistics = hopper._layouts(e, torch.bfloat16)
    queries = hopper.QUERIES[e]
    types = dict.fromkeys(("q_desc", "dout_desc"), f"tensordesc<bf16{[1, queries, 1, e]},{tile!r}>")
    types |= dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), f"tensordesc<bf16{[1, hopper.KEYS, 1, e]},{tile!r}>")
    types |= {"statistics_desc": f"tensordesc<fp32{[2 * queries]},{statistics!r}>"}
    types |= {"dq_sums": "*fp32", "dk": "*bf16", "dv": "*bf16", "cu_seqlens": "*i32"}
    constants = {"scale": e**-0.5, "CAUSAL": causal, "WINDOWED": windowed, "PACKED": packed, "STAGES": hopper.STAGES}
    types |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, of in types.items() if of.startswith("*")},
    )
    options = {"num_warps": hopper.WARPS, "maxnreg": hopper.REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("COMPILED " + json.dumps({"ptx": compiled.asm["ptx"], "shared": compiled.metadata.shared}))
"""


def test_compiles_for_hopper_with_wgmma_and_tma_without_spills(triton_cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(triton_cache)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line.removeprefix("COMPILED ")) for line in done.stdout.splitlines() if line.startswith("COMPILED ")]
    assert len(compiled) == 2
    for kernel in compiled:
        loop = kernel["ptx"]
        assert "wgmma.mma_async" in loop and "cp.async.bulk.tensor.4d.shared" in loop  # tensor cores and TMA
        assert "red.global.add.v4.f32" in loop
        assert kernel["shared"] <= 232448  # the limit per program on Hopper
    assert re.findall(r"(\d+) bytes spill stores", done.stdout) == ["0", "0"]
    assert "Potential Performance Loss" not in done.stdout  # ptxas's warning for serialised wgmma


def slots(tokens: list[int], heads: int, queries: int, packed: bool) -> tuple[int, dict[tuple[int, int], int]]:
    """Slots per head (per head and sequence, unless packed), and the first slot of each (sequence, head)."""
    if not packed:
        of_head = -(-tokens[0] // queries)
        return of_head, {(i, h): (i * heads + h) * of_head for i in range(len(tokens)) for h in range(heads)}
    of_head = sum(tokens) // queries + len(tokens)
    return of_head, {(i, h): h * of_head + sum(tokens[:i]) // queries + i for i in range(len(tokens)) for h in range(heads)}


SEQUENCES = [([70, 70], 64, False), ([3], 128, False), ([1, 63, 0, 64, 65], 128, True), ([130, 129], 64, True)]


def as_batch(tokens: list[int], packed: bool) -> tuple[int, int, Tensor]:
    cu_seqlens = torch.tensor([0, *tokens]).cumsum(0).int()
    return (1, sum(tokens), cu_seqlens) if packed else (len(tokens), tokens[0], cu_seqlens)


def of_sequence(x: Tensor, i: int, cu_seqlens: Tensor, packed: bool) -> Tensor:
    return x[0, cu_seqlens[i] : cu_seqlens[i + 1]] if packed else x[i]


@pytest.mark.parametrize(("tokens", "e", "packed"), SEQUENCES)
def test_prepare_kernel_writes_statistics_and_zeros(tokens: list[int], e: int, packed: bool) -> None:
    heads, queries = 3, hopper.QUERIES[e]
    b, t, cu_seqlens = as_batch(tokens, packed)
    out, dout = torch.randn(2, b, t, heads, e)
    lse = torch.randn(b, heads, t)
    lse[0, 1, 0] = -torch.inf  # a query that attends to no key
    of_head, first = slots(tokens, heads, queries, packed)
    statistics = torch.full(((b * heads) * of_head, 2, queries), torch.nan)
    sums = torch.full((b * heads * of_head, queries * e), torch.nan)
    hopper.prepare_kernel[(len(tokens) * heads, -(-max(tokens) // queries))](
        dout, out, lse, statistics, sums, cu_seqlens, t, heads, of_head,
        *dout.stride()[:3], *out.stride()[:3], *lse.stride()[:2], D=e, QUERIES=queries, PACKED=packed,
    )  # fmt: skip
    delta = (out * dout).sum(-1)  # [b, t, heads]
    for (i, head), slot in first.items():
        tiles = -(-tokens[i] // queries)
        got = statistics[slot : slot + tiles].transpose(0, 1).reshape(2, -1)
        want = of_sequence(lse.transpose(1, 2), i, cu_seqlens, packed)[:, head] / torch.tensor(2.0).log()
        want = want.where(want.isfinite(), torch.tensor(torch.inf))
        torch.testing.assert_close(got[0, : tokens[i]], want)
        assert (got[0, tokens[i] :] == torch.inf).all()
        torch.testing.assert_close(got[1, : tokens[i]], -of_sequence(delta, i, cu_seqlens, packed)[:, head], atol=1e-5, rtol=1e-5)
        assert (got[1, tokens[i] :] == 0).all() and (sums[slot : slot + tiles] == 0).all()


def in_registers(tile: Tensor) -> Tensor:
    """A dq tile in the order written by `add_to_dq`: by warp, by 8 columns, by thread, by register."""
    queries, e = tile.shape
    columns = 128 // queries
    parts = tile.reshape(queries // 16, 2, 8, columns, e // columns // 8, 4, 2)  # rows: warp, half, thread; columns likewise
    return parts.permute(0, 3, 4, 2, 5, 1, 6).flatten()


@pytest.mark.parametrize(("tokens", "e", "packed"), SEQUENCES)
def test_finish_kernel_converts_dq(tokens: list[int], e: int, packed: bool) -> None:
    heads, queries = 3, hopper.QUERIES[e]
    b, t, cu_seqlens = as_batch(tokens, packed)
    want = torch.randn(b, t, heads, e)
    of_head, first = slots(tokens, heads, queries, packed)
    sums = torch.full((b * heads * of_head, queries * e), torch.nan)
    for (i, head), slot in first.items():
        rows = of_sequence(want, i, cu_seqlens, packed)[:, head]
        for tile in range(-(-tokens[i] // queries)):
            part = rows[tile * queries : (tile + 1) * queries]
            padded = torch.full((queries, e), torch.nan)
            padded[: len(part)] = part
            sums[slot + tile] = in_registers(padded)
    dq = torch.full_like(want, torch.nan)
    hopper.finish_kernel[(len(tokens) * heads, -(-max(tokens) // queries))](
        sums, dq, cu_seqlens, t, heads, of_head, scale=0.5, D=e, QUERIES=queries, PACKED=packed
    )
    torch.testing.assert_close(dq, want * 0.5)


def test_unsupported_on_a_cpu() -> None:
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    assert not hopper.supports(q, q, q, True, None, None)


def test_tma_reads_slices_of_packed_projections_but_not_unaligned_strides() -> None:
    qkv = torch.zeros(2, 8, 6, 64, dtype=torch.bfloat16)
    assert hopper._tma_can_read(qkv[:, :, 2:4])
    assert not hopper._tma_can_read(torch.zeros(2, 8, 2, 68, dtype=torch.bfloat16)[..., :64])  # rows not 16 bytes apart
    assert not hopper._tma_can_read(qkv[..., ::2])
    assert not hopper._tma_can_read(torch.zeros((), dtype=torch.bfloat16).expand(2, 8, 2, 64))
    assert not hopper._tma_can_read(
        torch.zeros(2 * 8 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 8, 2, 64)
    )  # start unaligned
