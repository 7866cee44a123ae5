"""Tables of `strata bench serve`, `startup`, `routing`, `transfer`, `tenants` and of the vLLM plugin's benchmark."""

import statistics
from typing import Any, NamedTuple

from docgen.markdown import bold, milliseconds, number, table
from docgen.record import Run

BARE = "vllm"


class Metric(NamedTuple):
    name: str
    kind: str  # of the requests; "" for all of them
    key: str
    least: float | None = None  # ratio to bare vLLM that is aimed at
    most: float | None = None

    def misses(self, ratio: float) -> bool:
        return (self.least is not None and ratio < self.least) or (self.most is not None and ratio > self.most)

    @property
    def aim(self) -> str:
        limit = f"at least {self.least}" if self.least is not None else f"at most {self.most}"
        return f"{self.name} {limit}"


UNIFORM = (
    Metric("output tokens/s", "", "tokens_per_s", least=0.97),
    Metric("TTFT p50", "", "ttft_p50", most=1.1),
    Metric("ITL p50", "", "itl_p50", most=1.2),
    Metric("ITL p99", "", "itl_p99", most=1.2),
)
MIXED = (
    Metric("output tokens/s", "", "tokens_per_s", least=0.9),
    Metric("TTFT p50, short prompts", "short", "ttft_p50"),
    Metric("ITL p50, short prompts", "short", "itl_p50"),
    Metric("ITL p99, short prompts", "short", "itl_p99", most=0.33),
    Metric("TTFT p50, long prompts", "long", "ttft_p50"),
)


def serve(run: Run) -> str:
    metrics = MIXED if run["settings"]["workload"]["name"] == "mixed" else UNIFORM
    others = [name for name in run["contenders"] if name != BARE]
    columns = ["load", "metric", f"`{BARE}`", *(cell for name in others for cell in (f"`{name}`", "ratio"))]
    rows = []
    for level in levels(run):
        for place, metric in enumerate(metrics):
            bare = value(run, BARE, level, metric)
            cells = [] if place else [label(level)]
            cells += [""] * bool(place) + [metric.name, shown(metric, bare)]
            for name in others:
                cells += [shown(metric, value(run, name, level, metric)), ratio(run, name, level, metric)]
            rows.append(cells)
    return "\n\n".join([_workload(run), table(columns, rows, numeric=2), *_legend(run, metrics)])


def levels(run: Run) -> list[dict[str, Any]]:
    """Loads that any contender was measured at, in their order."""
    found: list[dict[str, Any]] = []
    for contender in run["contenders"].values():
        found += [one["level"] for one in contender["levels"] if one["level"] not in found]
    return found


def value(run: Run, contender: str, level: dict[str, Any], metric: Metric) -> float | None:
    found = _measured(run, contender, level)
    summary = found.get("kinds", {}).get(metric.kind, {}) if metric.kind else found.get("summary", {})
    return summary.get(metric.key)


def shown(metric: Metric, found: float | None) -> str:
    return number(found) if metric.key == "tokens_per_s" else milliseconds(found)


def ratio(run: Run, contender: str, level: dict[str, Any], metric: Metric) -> str:
    """To bare vLLM: the run's own ratio, else that of the two figures."""
    one = _measured(run, contender, level)
    ratios = one.get("ratios_of_kinds", {}).get(metric.kind, {}) if metric.kind else one.get("ratios", {})
    found, bare = (value(run, name, level, metric) for name in (contender, BARE))
    result = ratios.get(metric.key) or (None if found is None or not bare else found / bare)
    if result is None:
        return "-"
    return bold(f"{result:.2f}", contender.startswith("strata") and metric.misses(result))


def _measured(run: Run, contender: str, level: dict[str, Any]) -> dict[str, Any]:
    levels = run["contenders"].get(contender, {"levels": []})["levels"]
    return next((one for one in levels if one["level"] == level), {})


def label(level: dict[str, Any]) -> str:
    return f"{level['concurrency']} concurrent" if level.get("concurrency") else f"{level['rate']:g} requests/s"


def _workload(run: Run) -> str:
    settings, workload = run["settings"], run["settings"]["workload"]
    prompts = f"{workload['input']} input and {workload['output']} output tokens"
    if workload["name"] == "mixed":
        prompts += f", {workload['long_share']:.0%} of the prompts {workload['long_input']:,} tokens long"
    clients = f"{settings['clients']} client process{'es' * (settings['clients'] > 1)}"
    rounds = "one round" if settings["rounds"] == 1 else f"medians of {settings['rounds']} rounds"
    start = "servers up side by side" if settings["side_by_side"] else "servers started in sequence"
    return f"Workload `{workload['name']}`: {prompts}; {clients}; {start}; {rounds}."


def _legend(run: Run, metrics: tuple[Metric, ...]) -> list[str]:
    about = [f"`{name}`: {one['about']}" for name, one in run["contenders"].items()]
    aims = "; ".join(metric.aim for metric in metrics if metric.least is not None or metric.most is not None)
    lines = ["; ".join(about) + ".", f"Aims, as ratios to `{BARE}`: {aims}. A missed aim is **bold**."]
    doubts = [
        f"`{name}`, {label(one['level'])}: {one['doubts']}"
        for name, contender in run["contenders"].items()
        for one in contender["levels"]
        if one.get("doubts")
    ]
    lines += [f"The load generator may limit these figures: {'; '.join(doubts)}."] if doubts else []
    return lines + [f"`{name}` has no figures: {reason.splitlines()[0]}" for name, reason in run.get("failed", {}).items()]


def startup(run: Run) -> str:
    medians = {name: statistics.median(seconds) for name, seconds in run["seconds"].items()}
    rows = [
        (name, number(medians[name], ".1f", " s"), number(min(seconds), ".1f", " s"), number(max(seconds), ".1f", " s"))
        for name, seconds in run["seconds"].items()
    ]
    times = table(("time to first answer", "median", "least", "most"), rows, numeric=1)
    ratio, on_gpu = run["ratio_of_medians"], bool(run["machine"]["gpus"])
    most = 1.2 if on_gpu else 1  # a pair beside one server; two servers
    aim = f"Ratio of the medians: {bold(f'{ratio:.2f}', ratio > most)} (aim: at most {most})."
    return "\n\n".join((times, *_phases(run), aim))


def _phases(run: Run) -> list[str]:
    """Seconds of each phase in the first round; none where the logs show none."""
    engines = [
        (f"{name}: {engine}", phases) for name, rounds in run.get("phases", {}).items() for engine, phases in rounds[0].items()
    ]
    if not engines:
        return []
    names = list(engines[0][1])
    rows = [(engine, *(f"{phases[name]:.0f} s" if name in phases else "-" for name in names)) for engine, phases in engines]
    return [table(("phases of the start", *names), rows, numeric=1)]


def transfer(run: Run) -> str:
    rows = [
        (way, count, milliseconds(one["total_s"]), milliseconds(one["post_s"]), f"{run['bytes'] / one['total_s'] / 1e9:.1f} GB/s")
        for way, readings in run["readings"].items()
        for count, one in readings.items()
    ]
    memory = f"{run['bytes'] / 2**20:.0f} MiB between two processes, {run['device'].upper()} memory"
    return table((memory, "descriptors", "best", "of that posting", "bandwidth"), rows, numeric=1)


def tenants(run: Run) -> str:
    settings, ratios = run["settings"], run["ratios"]
    rows = []
    for name, label in (("ttft_p50", "TTFT p50"), ("ttft_p99", "TTFT p99"), ("itl_p50", "ITL p50"), ("itl_p99", "ITL p99")):
        values = (milliseconds(run["quiet"][phase][name]) for phase in ("baseline", "flood"))
        missed = name.endswith("p99") and ratios[name] is not None and ratios[name] > 1.1
        rows.append((label, *values, bold(number(ratios[name], ".2f"), missed)))
    flood = f"{settings['flood']:g} times its share"
    load = f"Two tenants of equal weight with {settings['share']} sequences each; {settings['input']} input and "
    load += f"{settings['output']} output tokens; medians of {settings['rounds']} rounds. Aim at p99: at most 1.10."
    return f"{load}\n\n{table(('quiet tenant', 'the other sends its share', f'{flood}', 'ratio'), rows, numeric=1)}"


def routing(run: Run) -> str:
    load, ratios, took = run["load"], run["ratios"], run["decision"]
    rows = [
        (
            f"`{name}`",
            f"{found['hit_rate']:.1%}",
            f"{found['reachable_hit_rate']:.1%}",
            milliseconds(found["ttft_p50_s"]),
            milliseconds(found["ttft_p90_s"]),
        )
        for name, found in run["routings"].items()
    ]
    hits, ttft = ratios["hits_of_reachable"], ratios["ttft_p50_of_least_busy"]
    p99 = bold(f"{took['p99_ms']:.2f}", took["p99_ms"] >= 1)
    text = (
        f"{load['conversations']} conversations of {load['turns']} turns with {load['systems']} system prompts of "
        f"{load['system_tokens']} tokens, {load['concurrency']} at a time on {load['replicas']} replicas; {load['rounds']} "
        "rounds in alternating order."
    )
    bars = (
        f"`kv` finds {bold(f'{hits:.3f}', hits < 0.95)} of the hits that knowledge of every cache allows (aim: at least 0.95), "
        f"with {bold(f'{ttft:.2f}', ttft > 0.5)} of the TTFT p50 of `least-busy` (aim: at most 0.5). A choice among "
        f"{took['replicas']} replicas takes {took['p50_ms']:.2f} ms, p99 {p99} ms."
    )
    columns = ("`serve.routing`", "prefix hits", "reachable", "TTFT p50", "TTFT p90")
    return "\n\n".join([text, table(columns, rows, numeric=1), bars])


def vllm_plugin(run: Run) -> str:
    rows = []
    for workload, ratios in run["ratio_to_vllm"].items():
        for name, found in ratios.items():
            if name != BARE:
                error = found["standard_error"]
                spread = "" if error is None else f" ± {error:.3f}"
                missed = found["ratio"] + (error or 0.0) < 1
                rows.append((workload, f"`{name}`", bold(f"{found['ratio']:.3f}{spread}", missed)))
    speeds = table(("workload", "engine", f"output tokens/s ÷ `{BARE}`, with standard error"), rows, numeric=2)
    answers = [
        (
            f"`{name}`",
            f"{found['equal']} of {found['of']}",
            number(found["log_probabilities_apart"]["mean"], ".3f"),
            number(found["log_probabilities_apart"]["most"], ".3f"),
        )
        for name, found in run["answers"].items()
    ]
    columns = (f"greedy answers beside `{BARE}`", "identical", "log-probability difference, mean", "largest")
    return f"{speeds}\n\n{table(columns, answers, numeric=1)}"
