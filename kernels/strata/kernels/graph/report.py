"""`strata compile report`: the fusions that backend strata makes in a model's training step, without weights and without a GPU.

The model is built from its configuration on torch's meta device, so that only shapes are computed.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

from strata.kernels.graph import picture
from strata.kernels.graph.passes import fuse
from strata.kernels.graph.record import Record
from strata.platform.errors import UserError
from strata.platform.files import write_atomic

FORMULA = (
    "Estimated for one forward pass from the shapes, against one kernel per operation: bytes = reads and writes of the replaced "
    "operations - inputs and outputs of the fused one (the loss also writes and reads its logits); launches = operations - 1. "
    "Inductor alone merges a part of them."
)


class _Captured(Exception):
    """Ends the call of a compiled function once its graph is known."""


@dataclass
class Capture:
    record: Record = field(default_factory=Record)
    before: list[picture.Box] = field(default_factory=list)
    after: list[picture.Box] = field(default_factory=list)

    def patterns(self) -> dict[str, str]:
        return {name: fusion.pattern for fusion in self.record.fused for name in fusion.nodes}


def capture(function: Callable[..., Any], *arguments: Any) -> Capture:
    """Graph of a function before and after fusion. The function is traced with these arguments, and not run."""
    found = Capture()

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.before += picture.boxes(module.graph)
        fuse(module, found.record)
        found.after += picture.boxes(module.graph)

        def stop(*_: Any) -> None:
            raise _Captured

        return stop

    torch._dynamo.reset()
    try:
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*arguments)
    except _Captured:
        return found
    finally:
        torch._dynamo.reset()
    raise AssertionError("the graph was not called")


def training_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    return loss


def load(model: str) -> nn.Module:
    """The model of a folder or a hub id, with its configuration's shapes and no values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            built: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        fix = "Give a folder with a config.json, or the hub id of a causal language model."
        raise UserError(f"There is no model '{model}': {str(error).splitlines()[0]}", fix) from error
    return built.train()


def report(model: str, batch: int, tokens: int, path: Path | None) -> Capture:
    console = Console(highlight=False, soft_wrap=True)
    built = load(model)
    with console.status("tracing"):
        found = capture(training_step(built), torch.zeros(batch, tokens, dtype=torch.int64, device="meta"))
    console.print(f"{model}: training step in bf16, {batch} x {tokens} tokens, {found.record.graphs} graph\n")
    for shown in (by_pattern(found.record), by_layer(found.record), left_out(found.record)):
        if shown.row_count:
            console.print(shown)
            console.print()
    console.print(FORMULA)
    target = path or Path("graph.svg")
    write_atomic(target, drawing(found, model))
    console.print(f"picture: {target}")
    return found


def by_pattern(record: Record) -> Table:
    table = Table("fused", "count", "bytes saved", "launches saved", box=None, header_style="bold")
    for pattern, count in record.counts().items():
        fusions = [fusion for fusion in record.fused if fusion.pattern == pattern]
        size = sum(fusion.bytes_saved or 0 for fusion in fusions)
        table.add_row(pattern, str(count), f"{size / 2**20:,.0f} MiB", str(sum(fusion.launches_saved for fusion in fusions)))
    size, launches = sum(each.bytes_saved or 0 for each in record.fused), sum(each.launches_saved for each in record.fused)
    table.add_row("all", str(len(record.fused)), f"{size / 2**20:,.0f} MiB", str(launches))
    return table


def by_layer(record: Record) -> Table:
    """Fusions per layer; layers with equal counts are one row."""
    layers: dict[str, Counter[str]] = {}
    for fusion in record.fused:
        layers.setdefault(layer(fusion.where), Counter())[fusion.pattern] += 1
    names: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, counts in layers.items():
        names.setdefault(tuple(sorted(counts.items())), []).append(name)
    table = Table("layers", "fused in each", box=None, header_style="bold")
    for counted, equal in names.items():
        shown = equal[0] if len(equal) == 1 else f"{equal[0]} … {equal[-1]} ({len(equal)})"
        table.add_row(shown, ", ".join(f"{pattern} {count}" for pattern, count in counted))
    return table


def left_out(record: Record) -> Table:
    table = Table("not fused", "count", "first at", "reason", box=None, header_style="bold")
    for (pattern, reason), count in Counter((refusal.pattern, refusal.reason) for refusal in record.refused).items():
        first = next(each.where for each in record.refused if (each.pattern, each.reason) == (pattern, reason))
        table.add_row(pattern, str(count), first or "the loss", reason)
    return table


def layer(where: str) -> str:
    found = re.match(r"(.*?layers\.\d+)", where)
    return found[1] if found else "outside of the layers"


def drawing(found: Capture, model: str) -> str:
    """The last layer, and the loss that follows it."""
    layers = [layer(box.where) for box in found.before if "layers." in box.where]
    block = layers[-1] if layers else ""
    before, after = (picture.of_one_block(boxes, block) for boxes in (found.before, found.after))
    return picture.svg(before, after, found.patterns(), f"{model}: {block} and the loss")
