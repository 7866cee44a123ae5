"""Tables and excerpts of compiled kernels: a summary, two variants side by side, and the inner loop of each stage."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from strata.kernels.compiler.stages import TITLES, Compiled

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # maximum bytes per block
LINES = 14  # of an excerpt
LEXERS = {"ttir": "llvm", "ttgir": "llvm", "llir": "llvm", "ptx": "ptx", "sass": "sass"}  # MLIR is close enough to LLVM IR

# Weights of lines by their role in the inner loop: matrix products, then loads and stores, then barriers and waits.
LINE_WEIGHTS = {
    4: re.compile(r"tt\.dot|warp_group_dot |tc_gen5_mma|mma\.sync|wgmma\.mma|tcgen05\.mma|\b(HMMA|HGMMA|UTC\w*MMA)\b"),
    2: re.compile(r"tt\.(load|store|desc|reduce)|async_(copy|tma)|\b(ld|st)\.global|cp\.async\.|\b(LDG|STG|LDGSTS|UTMA\w+)\b"),
    1: re.compile(r"ttng\.|ttg\.local_(load|store)|mbarrier|ex2|\b(LDSM|STSM|SYNCS|MUFU)\b"),
}
# Debug information: source lines in MLIR and PTX, metadata in LLVM IR.
NOISE = re.compile(r"^\s*(#loc|\.loc\b|\.file\b|\$L__tmp|//|\.section|\.b8|\.b32|![\w.]* =|source_|target |declare |;)|^\s*$")


def summary(columns: Mapping[str, Compiled]) -> Table:
    """Table with one column per variant."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(next(iter(columns.values())).compilation.name)
    for heading in columns:
        table.add_column(heading, justify="right")
    rows = [facts(one) for one in columns.values()]
    for name in rows[0]:
        values = [row[name] for row in rows]
        style = "bold" if len(set(values)) > 1 else "red" if name == "spills" and values[0] != "none" else ""
        table.add_row(name, *values, style=style)
    return table


def facts(one: Compiled) -> dict[str, str]:
    constants = {name: value for name, value in one.compilation.constants().items() if isinstance(value, int | bool | str)}
    return {
        "architecture": f"sm_{one.arch}",
        "constants": "\n".join(f"{name}={value}" for name, value in constants.items()) or "none",
        "warps": str(one.warps),
        "registers per thread": str(one.registers),
        "shared memory": f"{one.shared:,} bytes" + (" (too much)" if one.shared > SHARED_MEMORY[one.arch] else ""),
        "spills": f"{one.stack} bytes, {one.spilled} instructions" if one.stack or one.spilled else "none",
        "tensor cores": counts(one.tensor_cores),
        "TMA": counts(one.tma),
        "asynchronous copies": str(one.async_copies),
        "global loads": ", ".join(f"{count} x {width} bits" for width, count in one.loads.items()) or "none",
        "128-bit accesses": str(one.wide),
        "instructions": f"{one.instructions:,}",
        "compiled in": f"{one.seconds:.1f} s",
    }


def as_json(one: Compiled) -> dict[str, Any]:
    fields = (
        "arch",
        "registers",
        "stack",
        "shared",
        "warps",
        "spilled",
        "tensor_cores",
        "tma",
        "wide",
        "loads",
        "async_copies",
        "instructions",
    )
    constants = {
        name: value if isinstance(value, int | str) else str(value) for name, value in one.compilation.constants().items()
    }
    return {
        "kernel": one.compilation.name,
        "constants": constants,
        "options": {name: str(value) if value is None else value for name, value in one.compilation.options.items()},
        **{name: getattr(one, name) for name in fields},
        "seconds": round(one.seconds, 3),
    }


def shortened(columns: Sequence[Compiled]) -> Iterable[RenderableType]:
    """An excerpt of each stage, with the variants side by side."""
    for stage in TITLES:
        texts = [one.texts.get(stage) for one in columns]
        if not any(texts):
            continue  # Gluon kernels have no Triton IR, CUDA C++ only PTX and SASS
        sizes = " and ".join(f"{len(text.splitlines()):,} lines" for text in texts if text)
        grid = Table.grid(expand=True, padding=(0, 2))
        for _ in columns:
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_row(*(coloured(stage, excerpt(text)) if text else Text("-") for text in texts))
        yield Group(Text(f"\n{TITLES[stage]}, {sizes}", style="bold"), grid)


def excerpt(text: str, lines: int = LINES) -> str:
    """The window of lines with the most loads, stores and matrix products: the inner loop, if the kernel has one."""
    shown = [_short(line) for line in text.splitlines() if not NOISE.search(line)]
    weights = [next((weight for weight, pattern in LINE_WEIGHTS.items() if pattern.search(line)), 0) for line in shown]
    start = max(range(max(len(shown) - lines, 0) + 1), key=lambda first: sum(weights[first : first + lines]))
    return "\n".join(shown[start : start + lines])


def coloured(stage: str, text: str) -> Syntax:
    return Syntax(text, LEXERS[stage], theme="ansi_dark", background_color="default")


def counts(named: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in named.items() if count) or "none"


def _short(line: str) -> str:
    line = re.sub(r"^\s*/\*[0-9a-f]{4,}\*/\s+", "  ", line)  # addresses
    line = re.sub(r"\s*loc\([^()]*(\([^()]*\)[^()]*)?\)|, !dbg !\d+", "", line)
    return re.sub(r"^(\s*)", lambda indent: indent[1].replace("\t", "  "), line).rstrip()
