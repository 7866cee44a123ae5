"""The command `strata bench quantized`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

from strata.serving.bench.quantized.contenders import CONTENDERS


def bench_quantized(
    contenders: Annotated[str, typer.Option(help="Engines to measure, in this order.")] = ",".join(CONTENDERS),
    layers: Annotated[int, typer.Option(help="Decoder layers.", min=1)] = 32,
    hidden: Annotated[int, typer.Option(help="Hidden size.", min=128)] = 4096,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", min=1)] = 8,
    ffn: Annotated[int, typer.Option(help="Size of the feed-forward block.", min=128)] = 14336,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.", min=128)] = 128256,
    concurrency: Annotated[str, typer.Option(help="Concurrent requests of each level.")] = "1,4,16,64,256",
    input: Annotated[int, typer.Option(help="Tokens per prompt.", min=1)] = 128,
    output: Annotated[int, typer.Option(help="Tokens per answer after the first.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds of each level; results are medians.", min=1)] = 3,
    head: Annotated[
        bool, typer.Option("--head", help="Quantize the output layer, too, as 'strata quantize --head' does.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Skip torch.compile and CUDA graphs.")] = False,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: bench/quantized.json in Strata's cache.")] = None,
) -> None:
    """Compare decode tokens per second of bf16, W4A16 and FP8 weights, random ones, in vLLM engines one after another. W4A16 runs
    on vLLM's kernels and on Strata's, FP8 with a KV cache in 16 bits and in fp8. The default shape is that of an 8B Llama. Exits
    with 1 if an engine failed."""
    from rich.console import Console

    from strata.platform.errors import UserError
    from strata.platform.files import cache_dir
    from strata.serving.bench.quantized import run
    from strata.serving.bench.quantized.contenders import named
    from strata.serving.bench.quantized.measure import Load
    from strata.serving.bench.quantized.model import Shape

    levels = tuple(int(word) if word.isdecimal() else 0 for word in concurrency.split(","))
    if not all(levels):
        raise UserError(f"--concurrency {concurrency} is not a list of positive numbers.", "Write --concurrency 1,16.")
    chosen = tuple(named(word) for word in contenders.split(","))
    shape = Shape(layers, hidden, heads, kv_heads, ffn, vocab)
    shape.require_supported()
    load = Load(levels, input, output, rounds, eager, head)
    path = json or cache_dir() / "bench" / "quantized.json"
    if not run.bench(chosen, shape, load, path, Console(highlight=False, soft_wrap=True)):
        raise typer.Exit(1)
