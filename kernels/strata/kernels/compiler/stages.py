"""Compiles a kernel for an architecture and records every compiler stage, resource usage and instruction counts."""

import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.kernels.compiler.compilation import Compilation

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
TITLES = {"ttir": "Triton IR", "ttgir": "GPU IR", "llir": "LLVM IR", "ptx": "PTX", "sass": "SASS"}

# Prefixes of SASS instructions, by the feature they show. Spills are loads and stores of local memory.
TENSOR_CORES = {"mma.sync": "HMMA", "wgmma": "HGMMA", "tcgen05": "UTC.*MMA"}
TMA = {"loads": "UTMALDG", "stores": "UTMASTG", "reductions": "UTMAREDG"}
WIDE = r"(LD|ST|LDG|STG)\.[\w.]*128"
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. `texts` holds the stages it went through (Gluon starts at GPU IR). `stack` is bytes per thread, `shared`
    bytes per block; `spilled` counts instructions that move registers to or from local memory."""

    compilation: Compilation
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
    async_copies: int
    instructions: int
    seconds: float


def compile_stages(compilation: Compilation, arch: int) -> Compiled:
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
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run_tool(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
        sass = _readable(_run_tool(knobs.nvidia.nvdisasm.path, "--print-code", cubin))
    texts = {stage: compiled.asm[stage] for stage in STAGES if stage in compiled.asm and stage != "sass"} | {"sass": sass}
    mnemonics = opcodes(sass)
    return Compiled(
        compilation,
        arch,
        texts,
        registers=_number("REG", usage),
        stack=_number("STACK", usage),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        spilled=matching("(LDL|STL)", mnemonics),
        tensor_cores={name: matching(pattern, mnemonics) for name, pattern in TENSOR_CORES.items()},
        tma={name: matching(pattern, mnemonics) for name, pattern in TMA.items()},
        wide=matching(WIDE, mnemonics),
        async_copies=matching("LDGSTS", mnemonics),
        instructions=sum(mnemonics.values()) - mnemonics["NOP"],
        seconds=seconds,
    )


def opcodes(sass: str) -> Counter[str]:
    """Number of occurrences of each instruction, with its modifiers (`LDG.E.128`)."""
    return Counter(found[1] for line in sass.splitlines() if (found := INSTRUCTION.match(line)))


def matching(pattern: str, mnemonics: Counter[str]) -> int:
    return sum(count for mnemonic, count in mnemonics.items() if re.match(rf"{pattern}(\.|$)", mnemonic))


def _readable(sass: str) -> str:
    """SASS without assembler directives and source line numbers."""
    return "\n".join(line.rstrip() for line in sass.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/|\.L_|\s*\.text\.", line))


def _number(name: str, usage: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    assert found, f"cuobjdump printed no {name}: {usage}"
    return int(found[1])


def _run_tool(tool: str, *arguments: Any) -> str:
    return subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True).stdout
