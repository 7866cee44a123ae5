"""Compiles a kernel for an architecture and records every compiler stage, resource usage and instruction counts."""

import math
import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.kernels.compiler.compilation import Compilation, CudaCompilation
from strata.kernels.ladder.nvcc import compile_cuda

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
TITLES = {"ttir": "Triton IR", "ttgir": "GPU IR", "llir": "LLVM IR", "ptx": "PTX", "sass": "SASS"}

# Prefixes of SASS instructions, by the feature they show. Spills are loads and stores of local memory.
TENSOR_CORES = {"mma.sync": "HMMA", "wgmma": "HGMMA", "tcgen05": "UTC.*MMA"}
TMA = {"loads": "UTMALDG", "stores": "UTMASTG", "reductions": "UTMAREDG"}
WIDE = r"(LD|ST|LDG|STG)\.[\w.]*128"
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. `texts` holds the stages it went through (Gluon starts at GPU IR, CUDA C++ at PTX). `stack` is bytes per
    thread, `shared` bytes per block; `spilled` counts instructions that move registers to or from local memory; `loads` counts
    loads of global memory into registers by their width in bits."""

    compilation: Compilation | CudaCompilation
    arch: int
    texts: dict[str, str]
    registers: int
    stack: int
    shared: int
    warps: int
    spilled: int
    tensor_cores: dict[str, int]
    tma: dict[str, int]
    wide: int
    loads: dict[str, int]
    async_copies: int
    instructions: int
    seconds: float


def compile_stages(compilation: Compilation | CudaCompilation, arch: int) -> Compiled:
    if isinstance(compilation, CudaCompilation):
        return _compile_cuda(compilation, arch)
    return _compile_triton(compilation, arch)


def _compile_triton(compilation: Compilation, arch: int) -> Compiled:
    """Compiles without Triton's cache, so that `seconds` is the compile time of a first launch."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel, target = compilation.kernel, GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {**compilation.arguments, **compilation.options, "debug": False, "instrumentation_mode": ""}
    bound, specialization, options = bind(**given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    start = time.perf_counter()
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        compiled = compile(source, target=target, options=options.__dict__)
    seconds = time.perf_counter() - start
    texts = {stage: compiled.asm[stage] for stage in STAGES if stage in compiled.asm and stage != "sass"}
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    return _inspected(compilation, arch, texts, compiled.asm["cubin"], warps, seconds, shared)


def _compile_cuda(compilation: CudaCompilation, arch: int) -> Compiled:
    start = time.perf_counter()
    binary = compile_cuda(compilation.source.path, arch)
    seconds = time.perf_counter() - start
    warps = math.prod(compilation.source.threads) // 32
    # The binary's own figure includes what CUDA reserves on some architectures.
    shared = sum(int(size) for size in re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", binary.ptx))
    return _inspected(compilation, arch, {"ptx": binary.ptx}, binary.cubin, warps, seconds, shared)


def _inspected(
    compilation: Compilation | CudaCompilation,
    arch: int,
    texts: dict[str, str],
    cubin: bytes,
    warps: int,
    seconds: float,
    shared: int,
) -> Compiled:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run_tool(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path)
        sass = _readable(_run_tool(knobs.nvidia.nvdisasm.path, "--print-code", path))
    mnemonics = opcodes(sass)
    return Compiled(
        compilation,
        arch,
        texts | {"sass": sass},
        registers=_number("REG", usage),
        stack=_number("STACK", usage),
        shared=shared,
        warps=warps,
        spilled=matching("(LDL|STL)", mnemonics),
        tensor_cores={name: matching(pattern, mnemonics) for name, pattern in TENSOR_CORES.items()},
        tma={name: matching(pattern, mnemonics) for name, pattern in TMA.items()},
        wide=matching(WIDE, mnemonics),
        loads=load_widths(mnemonics),
        async_copies=matching("LDGSTS", mnemonics),
        instructions=sum(mnemonics.values()) - mnemonics["NOP"],
        seconds=seconds,
    )


def opcodes(sass: str) -> Counter[str]:
    """Number of occurrences of each instruction, with its modifiers (`LDG.E.128`)."""
    return Counter(found[1] for line in sass.splitlines() if (found := INSTRUCTION.match(line)))


def matching(pattern: str, mnemonics: Counter[str]) -> int:
    return sum(count for mnemonic, count in mnemonics.items() if re.match(rf"{pattern}(\.|$)", mnemonic))


def load_widths(mnemonics: Counter[str]) -> dict[str, int]:
    """Loads of global memory into registers, by width in bits, widest first. `LDG.E` without a width loads 32 bits."""
    found: Counter[int] = Counter()
    for mnemonic, count in mnemonics.items():
        name, *modifiers = mnemonic.split(".")
        if name == "LDG":
            widths = [int(one.lstrip("US")) for one in modifiers if re.fullmatch(r"[US]?(8|16)|64|128", one)]
            found[widths[0] if widths else 32] += count
    return {str(width): found[width] for width in sorted(found, reverse=True)}


def _readable(sass: str) -> str:
    """SASS without assembler directives and source line numbers."""
    return "\n".join(line.rstrip() for line in sass.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/|\.L_|\s*\.text\.", line))


def _number(name: str, usage: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    assert found, f"cuobjdump printed no {name}: {usage}"
    return int(found[1])


def _run_tool(tool: str, *arguments: Any) -> str:
    return subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True).stdout
