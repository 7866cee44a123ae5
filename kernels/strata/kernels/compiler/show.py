"""`strata kernels stages`: selects kernels and variants, compiles them and prints their stages."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from strata.kernels.compiler import view
from strata.kernels.compiler.calls import CALLS, calls
from strata.kernels.compiler.compilation import Compilation, CudaCompilation, assume_architecture, launched
from strata.kernels.compiler.stages import STAGES, TITLES, Compiled, compile_stages
from strata.kernels.ladder.cuda_source import SOURCES
from strata.kernels.ladder.nvcc import nvcc
from strata.platform.errors import UserError
from strata.platform.files import write_atomic

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # compiler options of every kernel


@dataclass(frozen=True)
class Variant:
    """An architecture, and overrides of the configuration that a launch on it would select."""

    arch: int
    changes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, arch: str, config: str | None) -> "Variant":
        if arch not in ARCHITECTURES:
            raise UserError(f"Kernels are not compiled for '{arch}'.", f"Use {', '.join(ARCHITECTURES)}.")
        return cls(int(arch.removeprefix("sm_")), dict(_setting(part) for part in (config or "").split(",") if part))

    def against(self, text: str) -> "Variant":
        """The variant of `--against`: settings like --config, optionally with another architecture."""
        parts = [part.strip() for part in text.split(",")]
        named = [part for part in parts if part.startswith("sm_")]
        arch = named[-1] if named else f"sm_{self.arch}"
        return Variant.parse(arch, ",".join(part for part in parts if part not in named))

    def heading(self) -> str:
        changes = " ".join(f"{name}={value}" for name, value in self.changes.items())
        return f"sm_{self.arch} {changes or 'as launched'}"


def show(op: str, kernel: str | None, variants: Sequence[Variant], stage: str | None, out: Path | None, console: Console) -> None:
    if stage not in (None, "all", *STAGES):
        raise UserError(f"There is no stage '{stage}'.", f"Use {', '.join(STAGES)} or all.")
    if op not in CALLS:
        raise UserError(f"There is no operation '{op}'.", f"Use one of {', '.join(CALLS)}.")
    if op == "matmul" and nvcc() is None:
        console.print("Steps in CUDA C++ are left out: nvcc is not installed.")
    names, kernels = _kernels(op, kernel, variants)
    columns: list[dict[str, Compiled]] = []
    with console.status("compiling") as status:
        for name in names:
            status.update(f"compiling {name}")
            columns.append(
                {
                    variant.heading(): _compiled(kernels[variant.heading()][name], variant)
                    for variant in variants
                    if name in kernels[variant.heading()]
                }
            )
    if out is not None:
        _write(out, columns)
    if stage is None:
        for one in columns:
            console.print(view.summary(one), "")
        for part in view.shortened(list(columns[0].values())):
            console.print(part)
        console.print(f"\nFull text of a stage: --kernel '{names[0]}' --stage ptx. All stages as files: --out DIR.")
    else:
        _print_whole(columns, STAGES if stage == "all" else (stage,), console)
    if out is not None:
        console.print(f"written to {out}")


def compilations(op: str, variant: Variant) -> dict[str, Compilation | CudaCompilation]:
    """Compilations by name, as launched on the variant's architecture with its overrides."""
    with assume_architecture(variant.arch, variant.changes) as settings:
        try:
            found = [one for label, run in calls(op).items() for one in launched(run, label)]
        except Exception as error:
            if not variant.changes:
                raise
            raise UserError(f"{op} cannot be launched with {variant.heading()}: {error}", "Override fewer settings.") from error
    known = settings | set(OPTIONS) | {name for one in found for name in one.constants()}
    if unknown := sorted(set(variant.changes) - known):
        raise UserError(f"No kernel of {op} has a setting {', '.join(unknown)}.", f"Use {', '.join(sorted(known))}.")
    sources = SOURCES.values() if op == "matmul" and nvcc() else ()
    by_hand: dict[str, Compilation | CudaCompilation] = {source.name: CudaCompilation(source) for source in sources}
    return by_hand | {one.name: _changed(one, variant.changes, settings) for one in found}


def _kernels(
    op: str, kernel: str | None, variants: Sequence[Variant]
) -> tuple[list[str], dict[str, dict[str, Compilation | CudaCompilation]]]:
    """The selected names, and the kernels of each variant by its heading. Architectures may have different kernels."""
    kernels = {variant.heading(): compilations(op, variant) for variant in variants}
    names = list(dict.fromkeys(name for found in kernels.values() for name in found))
    chosen = [name for name in names if kernel in (None, name, name.rpartition(": ")[2])]
    if not chosen:
        raise UserError(f"{op} has no kernel '{kernel}' here.", f"Use {', '.join(names)}.")
    return chosen, kernels


def _compiled(one: Compilation | CudaCompilation, variant: Variant) -> Compiled:
    try:
        return compile_stages(one, variant.arch)
    except Exception as error:
        if not variant.changes:
            raise  # a kernel that does not compile with its own settings is a bug
        raise UserError(f"{one.name} does not compile with {variant.heading()}: {error}", "Override fewer settings.") from error


def _changed(one: Compilation, changes: Mapping[str, int], settings: set[str]) -> Compilation:
    """Overrides constants and options that no tunable controls; a tunable's settings were overridden at the launch."""
    rest = {name: value for name, value in changes.items() if name not in settings}
    constants = {name: value for name, value in rest.items() if name in one.constants()}
    options = {name: value for name, value in rest.items() if name in OPTIONS}
    return replace(one, arguments={**one.arguments, **constants}, options={**one.options, **options})


def _setting(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"-?\d+|[Tt]rue|[Ff]alse", value.strip()):
        raise UserError(f"'{text}' is not a setting.", "Write NAME=NUMBER, such as BLOCK_N=64,num_warps=4.")
    word = value.strip().lower()
    return name.strip(), word == "true" if word in ("true", "false") else int(word)


def _print_whole(columns: Sequence[Mapping[str, Compiled]], stages: Sequence[str], console: Console) -> None:
    several = len(columns) * len(columns[0]) * len(stages) > 1
    for variants in columns:
        for heading, one in variants.items():
            for stage in stages:
                if several:
                    console.print(f"[bold]// {one.compilation.name}, {heading}, {stage}[/]")
                text = one.texts.get(
                    stage, f"// {one.compilation.name} has no {TITLES[stage]}: Gluon starts at GPU IR, CUDA C++ at PTX"
                )
                if console.is_terminal:
                    console.print(view.coloured(stage, text), soft_wrap=True)
                else:
                    sys.stdout.write(text.rstrip("\n") + "\n")


def _write(folder: Path, columns: Sequence[Mapping[str, Compiled]]) -> None:
    facts = []
    for variants in columns:
        for heading, one in variants.items():
            stem = re.sub(r"[^\w=.]+", "-", f"{one.compilation.name} {heading}")
            for stage, text in one.texts.items():
                write_atomic(folder / f"{stem}.{stage}", text)
            facts.append(view.as_json(one) | {"variant": heading})
    write_atomic(folder / "summary.json", json.dumps(facts, indent=2))
