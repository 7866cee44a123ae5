"""`strata bench compile`: the training step of a Hugging Face model under torch.compile, by backend.

Every contender trains the same random weights on the same tokens, in a process of its own: Liger-Kernel replaces functions of
transformers' modules. The step is forward, backward and AdamW, with parameters and optimizer state in the model's dtype.
"""

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from strata.kernels import graph
from strata.kernels.graph.record import Record
from strata.platform import benchmark_record
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic

# "causal" contenders run torch's attention with is_causal, without the mask that transformers builds when it is compiled.
CONTENDERS = ("strata", "inductor", "liger", "inductor-causal", "liger-causal", "eager")
DEFAULT = CONTENDERS[:-1]
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}


@dataclass(frozen=True)
class Settings:
    model: str
    batch: int
    tokens: int
    steps: int
    warmup: int


@dataclass(frozen=True)
class Measurement:
    """One contender. `loss` is of the first step, before any update; `last_loss` of the last step."""

    contender: str
    seconds: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    peak_bytes: int | None = None
    first_step_seconds: float = 0.0
    loss: float = 0.0
    last_loss: float = 0.0
    fused: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def bench(settings: Settings, contenders: tuple[str, ...], path: Path | None) -> list[Measurement]:
    """Measures the contenders one after the other, prints a table and writes JSON after each of them."""
    if unknown := set(contenders) - set(CONTENDERS):
        raise UserError(f"There is no contender '{min(unknown)}'.", f"Use {', '.join(CONTENDERS)}.")
    console = Console(highlight=False, soft_wrap=True)
    target = path or cache_dir() / "bench" / "compile.json"
    results: list[Measurement] = []
    for contender in contenders:
        with console.status(f"{contender}: compiling and training"):
            results.append(_in_a_process(contender, settings))
        write_atomic(target, json.dumps(as_json(settings, results), indent=2))
    console.print(table(results))
    console.print(f"written to {target}")
    return results


def as_json(settings: Settings, results: list[Measurement]) -> dict[str, Any]:
    rows = [asdict(row) for row in results]
    return benchmark_record.header("compile") | {"settings": asdict(settings), "contenders": rows}


def _in_a_process(contender: str, settings: Settings) -> Measurement:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measure, contender, settings).result()
        except Exception as error:  # a missing package, no memory left, a compiler's failure: the others still run
            return Measurement(contender, error=f"{type(error).__name__}: {str(error)[:500]}")


def measure(contender: str, settings: Settings, options: dict[str, Any] | None = None) -> Measurement:
    """Trains in this process. `options` are those of backend strata."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = _model(contender, settings, device)
    record = Record()
    step = _compiled(contender, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, record, options or {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    seconds, losses = [], []
    peak = None
    generator = torch.Generator().manual_seed(1)
    for index in range(settings.warmup + settings.steps):
        ids = torch.randint(model.config.vocab_size, (settings.batch, settings.tokens), generator=generator).to(device)
        if index == settings.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for the device
        seconds.append(time.perf_counter() - start)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    measured = seconds[settings.warmup :]
    rate = settings.batch * settings.tokens / statistics.median(measured)
    return Measurement(contender, measured, rate, peak, seconds[0], losses[0], losses[-1], record.counts())


def _model(contender: str, settings: Settings, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    shape = SHAPES.get(settings.model)
    config = LlamaConfig(**shape) if shape else AutoConfig.from_pretrained(settings.model)
    attention = "sdpa"
    if contender.endswith("-causal"):
        attention = _register_causal_attention()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if contender.startswith("liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    return model.train()


def _register_causal_attention() -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa_causal", lambda *_, **__: None)
    return "sdpa_causal"


def _compiled(
    contender: str, loss: Callable[[Tensor], Tensor], record: Record, options: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    if contender == "eager":
        return loss
    if contender == "strata":
        graph.register()
        chosen: Any = {**options, "record": record}
        return torch.compile(loss, backend="strata", fullgraph=True, dynamic=False, options=chosen)
    return torch.compile(loss, dynamic=False)


def table(results: list[Measurement]) -> Table:
    best = next((row.tokens_per_second for row in results if row.contender == "strata" and not row.error), None)
    first = next((row.loss for row in results if not row.error), 0.0)
    shown = Table("contender", "tokens/s", "Strata vs", "step", "peak memory", "first step", "loss", "loss error", box=None)
    for row in results:
        if row.error:
            shown.add_row(row.contender, row.error)
            continue
        shown.add_row(
            row.contender,
            f"{row.tokens_per_second:,.0f}",
            f"{best / row.tokens_per_second:.2f}x" if best else "",
            f"{statistics.median(row.seconds) * 1e3:.1f} ms",
            f"{row.peak_bytes / 2**30:.1f} GiB" if row.peak_bytes else "",
            f"{row.first_step_seconds:.0f} s",
            f"{row.loss:.4f} → {row.last_loss:.4f}",
            f"{abs(row.loss - first) / max(abs(first), 1e-9):.1e}",
        )
    return shown
