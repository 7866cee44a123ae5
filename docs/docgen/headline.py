"""README's table of headline results: single figures of the runs on the results pages."""

from collections.abc import Callable
from typing import Any

from docgen import kernels, record, serving
from docgen.markdown import duration, milliseconds, number, table
from docgen.record import Run

Load = Callable[[str], Run]
Row = tuple[str, str, str, str, str]  # workload, baseline, Strata, ratio, page
CONCURRENCY = 64
KERNELS = (
    ("flash_attention", "forward causal d128, 2 x 8k, 16 heads", "SDPA cuDNN", "attention forward, 8k causal", "cuDNN"),
    (
        "flash_attention",
        "backward causal d128, 2 x 8k, 16 heads",
        "SDPA FA2",
        "attention backward, 8k causal",
        "FlashAttention-2",
    ),
    ("linear_cross_entropy", "8192 x 4096 x 131072", "Liger", "loss over 131,072 words, both passes", "Liger"),
    ("paged_attention", "decode batch 32, 32k", "vLLM FA3", "decode attention, batch 32, 32k", "vLLM's FlashAttention-3"),
)


def headline(load: Load) -> str:
    rows = [*_serving(load), *_training(load), *_kernels(load), _startup(load), _faults(load)]
    columns = ("workload", "baseline", "Strata", "ratio", "details")
    gpu, cpu = record.hardware(load("serve-mixed-h200")), record.hardware(load("startup-laptop"))
    where = f"Serving, training and kernels: {gpu}. Start-up and kills: {cpu}. Latencies below 1 are better, rates above 1."
    return f"{where}\n\n{table(columns, [(*row[:4], f'[{row[4]}](docs/results/{row[4]}.md)') for row in rows])}"


def _serving(load: Load) -> list[Row]:
    uniform, mixed = load("serve-uniform-h200"), load("serve-mixed-h200")
    chosen = [(uniform, serving.UNIFORM[0], "uniform load")]
    chosen += [(mixed, metric, "mixed load") for metric in (serving.MIXED[0], serving.MIXED[1], serving.MIXED[3])]
    return [_served(run, metric, name) for run, metric, name in chosen]


def _served(run: Run, metric: serving.Metric, name: str) -> Row:
    ours = next(contender for contender in run["contenders"] if contender.startswith("strata"))
    level = next(level for level in serving.levels(run) if level["concurrency"] == CONCURRENCY)
    bare, found = (serving.value(run, contender, level, metric) for contender in (serving.BARE, ours))
    workload = f"{name}, {serving.label(level)}: {metric.name}"
    ratio = serving.ratio(run, ours, level, metric)
    return workload, f"bare vLLM {serving.shown(metric, bare)}", serving.shown(metric, found), ratio, "serving"


def _training(load: Load) -> list[Row]:
    contenders = load("train-h200-kernels")["contenders"]
    ours = contenders["ours"]["tokens_per_s"]
    rows: list[Row] = []
    for name, about in (("ours_torch", "torch's kernels"), ("ours_liger", "Liger's kernels")):
        theirs = contenders[name]["tokens_per_s"]
        rows.append(("training, tokens/s", f"{about} {number(theirs)}", number(ours), f"{ours / theirs:.2f}", "training"))
    for run, about in (("finetune-h200-sft", "1B, all weights"), ("finetune-h200-lora", "8B, LoRA")):
        contenders = load(run)["contenders"]
        ours = contenders["ours"]["tokens_per_s"]
        fastest = max((one for name, one in contenders.items() if name != "ours"), key=lambda one: one["tokens_per_s"])
        theirs, peer = fastest["tokens_per_s"], f"{fastest['name']} {number(fastest['tokens_per_s'])}"
        rows.append((f"fine-tuning {about}, tokens/s", peer, number(ours), f"{ours / theirs:.2f}", "training"))
    stalls = load("checkpoint-laptop")["median_seconds"]
    ratio = f"{stalls['async'] / stalls['sync']:.2f}"
    row = (
        "step stall of a checkpoint",
        f"synchronous {milliseconds(stalls['sync'])}",
        milliseconds(stalls["async"]),
        ratio,
        "training",
    )
    return [*rows, row]


def _kernels(load: Load) -> list[Row]:
    cases = {(case["op"], case["case"]): case for case in load("kernels-h200")["cases"]}
    return [_kernel(cases[op, case], peer, about, name) for op, case, peer, about, name in KERNELS if (op, case) in cases]


def _kernel(case: dict[str, Any], peer: str, about: str, name: str) -> Row:
    ours, theirs = case["contenders"][kernels.OURS], case["contenders"][peer]
    return about, f"{name} {duration(theirs['ms'])}", duration(ours["ms"]), f"{theirs['ratio']:.2f}", "kernels"


def _startup(load: Load) -> Row:
    run = load("startup-laptop")
    ours, bare = (f"{sorted(seconds)[len(seconds) // 2]:.1f} s" for seconds in run["seconds"].values())
    return "start to first answer", f"two bare vLLM servers {bare}", ours, f"{run['ratio_of_medians']:.2f}", "serving"


def _faults(load: Load) -> Row:
    numbers = load("chaos-random")["numbers"]
    same = numbers["sent"] - numbers["lost"] - numbers["different"]
    return (
        f"{numbers['kills']} processes killed under load: answers equal to the undisturbed ones",
        f"{numbers['sent']:,} sent",
        f"{same:,}",
        f"{same / numbers['sent']:.2f}",
        "faults",
    )
