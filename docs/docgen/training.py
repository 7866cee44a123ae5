"""Tables of `strata bench train`, `finetune`, `checkpoint` and `memory`."""

from docgen.markdown import bold, milliseconds, number, signed, table
from docgen.record import Run

LEAST_OF_BARE = 0.95  # aim: tokens/s over those of a bare torch loop
LEAST_OF_LIGER = 1.05  # aim of fine-tuning: tokens/s over those of transformers with Liger, and no more memory


def train(run: Run) -> str:
    rows = []
    for contender, one in run["contenders"].items():
        last = one["rounds"][-1]
        memory, to_bare = last.get("peak_memory_bytes"), one.get("ratio_to_bare")
        missed = contender == "ours" and to_bare is not None and to_bare < LEAST_OF_BARE
        rows.append(
            (
                one["name"],
                number(one["tokens_per_s"]),
                number(one.get("mfu"), ".1%"),
                "-" if memory is None else f"{memory / 2**30:.1f} GiB",
                number(last.get("final_loss"), ".3f"),
                bold(number(to_bare, ".2f"), missed),
                number(one.get("ratio_to_liger"), ".2f"),
            )
        )
    columns = ("training", "tokens/s", "MFU", "peak memory", "final loss", "÷ bare torch", "÷ transformers with Liger")
    lines = [_model(run), table(columns, rows, numeric=1)]
    if any(one.get("ratio_to_bare") is not None for one in run["contenders"].values()):
        lines.append(f"Aim: at least {LEAST_OF_BARE} of bare torch. A missed aim is **bold**.")
    return "\n\n".join([*lines, *(f"Not run: {name}: {reason}" for name, reason in run.get("left_out", {}).items())])


def finetune(run: Run) -> str:
    """Contenders on packed rows. A contender's memory is compared with that of the fastest peer."""
    contenders = run["contenders"]
    memory = {name: one["rounds"][-1]["peak_memory_bytes"] for name, one in contenders.items()}
    peers = [name for name in contenders if name != "ours"]
    fastest = max(peers, key=lambda name: contenders[name]["tokens_per_s"])
    rows = []
    for name, one in contenders.items():
        speed, size = one["ratio_to_liger"], memory[name] / memory[fastest]
        rows.append(
            (
                one["name"],
                number(one["tokens_per_s"]),
                number(one.get("mfu"), ".1%"),
                f"{memory[name] / 2**30:.1f} GiB",
                number(one["rounds"][-1]["final_loss"], ".3f"),
                bold(f"{speed:.2f}", name == "ours" and speed < LEAST_OF_LIGER),
                bold(f"{size:.2f}", name == "ours" and size > 1),
            )
        )
    columns = ("fine-tuning", "tokens/s", "MFU", "peak memory", "final loss", "tokens/s ÷ peer", "memory ÷ peer")
    lora = run["recipe"]["train"].get("lora")
    kind = f"Adapters of rank {lora['rank']} on {len(lora['targets'])} projections." if lora else "All weights are trained."
    aim = f"The peer is the fastest one. Aim: at least {LEAST_OF_LIGER} at no more memory. A missed aim is **bold**."
    return "\n\n".join([f"{_model(run)} {kind}", table(columns, rows, numeric=1), aim])


def _model(run: Run) -> str:
    recipe = run["recipe"]
    model, settings, parallel = recipe["model"], recipe["train"], recipe["parallel"]
    shape = f"{model['layers']} layers of {model['hidden']}, sequences of {model['context']}"
    layout = f"{parallel['workers']} worker{'s' * (parallel['workers'] > 1)}, ZeRO {parallel['zero']}"
    return f"Model: {shape}; batch {settings['batch']}, {settings['precision']}; {layout}."


def checkpoint(run: Run) -> str:
    medians = run["median_seconds"]
    rows = [(mode, milliseconds(seconds), f"{seconds / medians['sync']:.3f}") for mode, seconds in medians.items()]
    return table(("checkpoint upload", "stall of a step, median", "÷ sync"), rows, numeric=1)


def memory_copies(run: Run) -> str:
    medians = run["median_seconds"]
    rows = [
        ("without a copy", milliseconds(medians["without"]), "1.000"),
        ("beside a copy", milliseconds(medians["with_copy"]), f"{run['ratio']:.3f}"),
        ("the copy itself", milliseconds(medians["copy"]), ""),
    ]
    return table(("step", "median", "÷ without a copy"), rows, numeric=1)


def memory(run: Run) -> str:
    rows = [
        (
            row["layout"],
            f"{row['planned'] / 2**20:.0f} MiB" if row.get("planned") else "-",
            f"{row['measured'] / 2**20:.0f} MiB" if row.get("measured") else "-",
            bold(signed(row["error"], 1), abs(row["error"]) > run["bar"]),
        )
        for row in run["layouts"]
    ]
    figures = table(("layout", "planned", "measured", "error"), rows, numeric=1)
    return f"{figures}\n\nAim: within {run['bar']:.0%}. A missed aim is **bold**."
