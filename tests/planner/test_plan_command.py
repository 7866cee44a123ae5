"""`strata plan` on the command line: output, errors, explanations, files and plots."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import STRATA, starts_fast
from typer.testing import CliRunner, Result

from strata.planner.catalogue.library import model
from strata.planner.catalogue.software import program
from strata.planner.cli.explain import substituted
from strata.planner.cli.plan import plan
from strata.planner.layout import Layout
from strata.planner.plan import TrainingPlan, plan_training
from strata.planner.step.step import plan_step
from strata.planner.units import count, show, size
from strata.planner.worksheet import FUNCTIONS, Worksheet
from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.platform.hardware.catalogue import fabric, gpu

LLAMA = ["--model", "llama-3-70b", "--gpu", "h100", "--data", "4", "--tensor", "8", "--pipeline", "4", "--recompute", "selective"]
PNG = b"\x89PNG"


def strata(*words: str) -> Result:
    """Run the command line in this process, with a wide terminal."""
    return CliRunner().invoke(build(), list(words), env={"COLUMNS": "140"})


def answered(*words: str) -> dict[str, Any]:
    result = strata(*words, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*words: str) -> UserError:
    error = strata(*words).exception
    assert isinstance(error, UserError), error
    return error


def llama(**more: Any) -> TrainingPlan:
    layout = Layout(data=4, tensor=8, pipeline=4, batch=64, recompute="selective")
    card = gpu("h100")
    return plan_training(model("llama-3-70b"), layout, 8192, card, fabric("ndr-400"), program("megatron-core"), **more)


def test_the_verdict_precedes_the_tables() -> None:
    text = strata("plan", *LLAMA, "--tokens", "15T").stdout
    for words in ("llama-3-70b (70.6B parameters) on 128 h100-sxm over ndr-400", "data 4 x tensor 8 x pipeline 4 (1f1b)"):
        assert words in text
    assert re.search(r"^(fits|does not fit): [\d.]+ GiB of 79.2 GiB \(\S+%\) at stage \d", text, re.MULTILINE)
    assert re.search(r"step [\d.]+ s · \S+ tokens/s .* MFU [\d.]+% · HFU [\d.]+% · limited by \w+", text)
    order = [text.index(title) for title in ("memory per GPU", "communication per step", "step time breakdown")]
    assert order == sorted(order)
    assert re.search(r"MTBF .* best checkpoint interval .* goodput", text)
    assert re.search(r"15T tokens: [\d,.]+ days .* GPU-hours, \$[\d.]+M", text)


def test_the_example_of_the_help_works() -> None:
    [example] = re.findall(r"^ *strata (plan --.*)$", plan.__doc__ or "", re.MULTILINE)
    assert strata(*example.split()).exit_code == 0


def test_json_is_enough_to_repeat_the_plan() -> None:
    found = answered("plan", *LLAMA, "--tokens", "15T", "--price", "2")
    again = plan_training(
        model("llama-3-70b"),
        Layout(**found["layout"]),
        found["sequence"],
        gpu(found["gpu"]["name"]),
        fabric(found["fabric"]["name"]),
        program(found["program"]),
    )
    assert found["step"]["seconds"] == again.step.seconds
    assert found["peak_bytes"] == again.memory.peak == max(stage["total"] for stage in found["memory"])
    assert sum(found["step"]["spent"].values()) == pytest.approx(found["step"]["seconds"])
    assert found["fits"] == (found["peak_bytes"] <= found["capacity_bytes"])
    budget = found["budget"]
    assert budget["dollars"] == pytest.approx(2 * budget["gpu_hours"])
    assert budget["gpu_hours"] == pytest.approx(24 * budget["days"] * found["gpus"])
    assert budget["days"] * found["failures"]["goodput"] == pytest.approx(budget["undisturbed_days"])


def test_json_goes_to_a_file_beside_the_tables(tmp_path: Path) -> None:
    result = strata("plan", *LLAMA, "--json", str(tmp_path / "plan.json"))
    assert "memory per GPU" in result.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["gpus"] == 128
    assert "cannot be written" in refused("plan", *LLAMA, "--json", str(tmp_path / "no" / "plan.json")).cause


def lines_of(worksheet: dict[str, Any]) -> dict[str, float]:
    found = {line["name"]: line["value"] for line in worksheet["lines"]}
    for part in worksheet["parts"]:
        found |= lines_of(part)
    return found


def test_explanations_have_the_figures_of_the_plan() -> None:
    found = answered("plan", *LLAMA, "--tokens", "15T", "--explain")
    lines = lines_of(found["explain"])
    assert lines["step"] == pytest.approx(found["step"]["seconds"])
    assert lines["mfu"] == found["step"]["mfu"]
    assert lines["goodput"] == found["failures"]["goodput"]
    assert lines["dollars"] == found["budget"]["dollars"]
    text = strata("plan", *LLAMA, "--tokens", "15T", "--explain").stdout
    assert f"mfu = {show(found['step']['mfu'], '', 5)}" in text
    assert "= model_flops / (step * gpus * peak)" in text


def worksheets() -> list[Worksheet]:
    from strata.planner.collectives.cost import explain, links
    from strata.planner.collectives.patterns import Place
    from strata.planner.serving.capacity import Slo, plan_serving
    from strata.planner.serving.engine_step import Load

    card, net = gpu("h100"), fabric("ndr-400")
    served, sparse = Worksheet("serving"), Worksheet("experts")
    plan_serving(model("llama-3-70b"), card, net, Load(20, 2000, 300), Slo(1, 0.05), tensor=4, worksheet=served)
    layout = Layout(data=16, pipeline=4, expert=8, batch=128, schedule="dualpipev", interleave=2)
    plan_step(model("deepseek-v3"), layout, card, net, program("megatron-core"), sparse, 4096)
    return [llama(tokens=15e12).worksheet, served, sparse, explain("all_reduce", 2.0**26, Place(8, 4), links(card, net))]


def test_a_substituted_formula_evaluates_to_the_value() -> None:
    def check(worksheet: Worksheet, outer: Worksheet | None) -> int:
        checked = 0
        for line, filled in substituted(worksheet, outer):
            if filled is not None:
                assert eval(filled, dict(FUNCTIONS)) == pytest.approx(line.value, rel=1e-4, abs=1e-12), (
                    worksheet.title,
                    line,
                    filled,
                )
                checked += 1
        return checked + sum(check(part, worksheet) for part in worksheet.parts)

    assert sum(check(worksheet, None) for worksheet in worksheets()) > 250


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--gpus", "100", "--tensor", "8"], "100 GPUs are not a multiple of tensor x pipeline x sequence x context = 8"),
        (["--data", "8", "--batch", "30"], "--batch 30 is not a multiple of data x micro-batch = 8"),
        (["--tensor", "128"], "--tensor 128 does not divide the 64 heads"),
        (["--tensor", "32", "--sequence", "4"], "--sequence 4 does not divide the 2 heads"),
        (["--sequence", "3"], "--sequence 3 does not divide the 64 heads"),
        (["--context", "3"], "--seq 8192 is not a multiple of sequence x context = 3"),
        (["--model", "mixtral-8x7b", "--data", "8", "--expert", "3"], "does not divide the 8 experts"),
        (["--model", "mixtral-8x7b", "--data", "4", "--expert", "8"], "does not divide the 4 GPUs that hold the same layers"),
        (["--model", "gpt-3-175b", "--seq", "4096"], "more than the 2048 positions"),
    ],
)
def test_an_invalid_layout_is_refused_with_a_valid_one(words: list[str], cause: str) -> None:
    words = words if "--model" in words else ["--model", "llama-3-70b", *words]
    error = refused("plan", *words)
    assert cause in error.cause
    fix = re.match(r"(--\S+) (\d+) works", error.fix)
    assert fix, error.fix
    option, value = fix.groups()
    if option in words:
        words[words.index(option) + 1] = value
    else:
        words += [option, value]
    assert strata("plan", *words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "cause", "fix"),
    [
        (["--model", "lama-3-70b"], "lama-3-70b", "llama-3-70b"),
        (["--model", "llama-3-8b", "--gpu", "h10"], "no GPU 'h10'", "h100"),
        (["--model", "llama-3-8b", "--fabric", "ndr"], "no fabric 'ndr'", "ndr-400"),
        (["--model", "llama-3-8b", "--program", "megatron"], "no program 'megatron'", "megatron-core"),
        (["--model", "llama-3-8b", "--gpu", "a100", "--precision", "fp8"], "does not compute in fp8", "bf16"),
        (["--model", "llama-3-8b", "--expert", "4", "--data", "4"], "no experts", "Leave --expert out"),
        (["--model", "llama-3-8b", "--pipeline", "40"], "cannot be cut into 40 parts", "Lower --pipeline"),
        (["--model", "llama-3-8b", "--data", "2", "--gpus", "8"], "contradict each other", "Use one"),
        (["--model", "llama-3-8b", "--tokens", "many"], "not a count", "15T"),
        (["--model", "llama-3-8b", "--recipe", "laptop"], "both name a model", "Use one"),
        (["--model", "llama-3-8b", "--zero", "4"], "--zero 4 is out of range", "0 to 3"),
        (["--gpus", "8"], "--model is missing", "strata plan list"),
        (["--recipe", "laptop", "train.bach=3"], "train.bach", "train.batch"),
        (["serch", "--gpus", "8"], "'serch' is not a plan command", "search"),
    ],
)
def test_invalid_options_are_refused_with_a_fix(words: list[str], cause: str, fix: str) -> None:
    error = refused("plan", *words)
    assert cause in error.cause and fix in error.fix


def test_a_recipe_is_planned_with_its_kernels() -> None:
    peaks = []
    for words, name in (
        ([], "strata"),
        (["train.kernels=liger"], "strata"),
        (["train.kernels=torch"], "strata-torch"),
        (["train.kernels=torch", "train.compile=false"], "strata-eager"),
    ):
        found = answered("plan", "--recipe", "h200", *words, "--gpu", "h200")
        assert found["program"] == name
        peaks.append(found["peak_bytes"])
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3]


def test_recipe_overrides_apply_to_the_plan() -> None:
    found = answered("plan", "--recipe", "16xh100-3d", "train.batch=512", "--gpu", "h200", "--zero", "0")
    layout = Layout(**found["layout"])
    assert (layout.batch, layout.zero, layout.gpus, found["program"]) == (512, 0, 16, "strata")
    assert found["gpu"]["name"] == "h200"


def test_counts_and_sizes_are_parsed_and_shown_with_units() -> None:
    assert [count(text, "-") for text in ("15T", "300B", "1e12", "16m", "8,192")] == [15e12, 300e9, 1e12, 16e6, 8192]
    assert [size(text, "-") for text in ("20GB/s", "64KiB", "2e9", "5.6TB", "512")] == [20e9, 65536, 2e9, 5.6e12, 512]
    shown = [show(84.99e9, "B"), show(3.35e12, "B/s"), show(1.5e-3, "s"), show(5400, "s"), show(3e5, "s"), show(1234567, "")]
    assert shown == ["79.2 GiB", "3.35 TB/s", "1.5 ms", "90 min", "3.47 days", "1,234,567"]


@pytest.mark.slow
def test_plots(tmp_path: Path) -> None:
    result = strata("plan", *LLAMA, "--plot", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    for name in ("memory", "step", "timeline"):
        drawn = tmp_path / "new" / f"{name}.png"
        assert drawn.read_bytes().startswith(PNG) and f"written: {drawn}" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "picture"),
    [
        (["serve", "--model", "llama-3-8b", "--rate", "5"], "latency"),
        (["failures", "--model", "llama-3-8b", "--gpus", "1024"], "checkpoints"),
        (["schedule", "--schedule", "zbv"], "timeline"),
        (["collectives", "--ranks", "16"], "collectives"),
    ],
)
def test_other_commands_print_write_and_plot(command: list[str], picture: str, tmp_path: Path) -> None:
    result = strata("plan", *command, "--plot", str(tmp_path), "--json", str(tmp_path / "x.json"))
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "x.json").read_text())
    assert (tmp_path / f"{picture}.png").read_bytes().startswith(PNG)


def test_schedules_are_compared() -> None:
    found = answered("plan", "schedule", "--stages", "4", "--micro-batches", "8")["schedules"]
    assert found["1f1b"]["bubble"] == pytest.approx(3 / 11)
    assert found["1f1b"]["in_flight"] == [4, 3, 2, 1]
    assert found["zbv"]["bubble"] < found["interleaved"]["bubble"] < found["gpipe"]["bubble"]


def test_collectives_step_by_step_and_their_cost() -> None:
    shown = strata("plan", "collectives", "--show", "ring", "--ranks", "4").stdout
    assert "6 steps; a rank sends 1.5 times its" in shown and "0→1:+0" in shown
    steps = answered("plan", "collectives", "--show", "ring", "--ranks", "4")["steps"]
    assert len(steps) == 6 and all(len(step) == 4 for step in steps)
    costs = answered("plan", "collectives", "--ranks", "8", "--gpu", "h200")
    assert costs["crossovers"][-1]["after"] == "nvls/Simple"
    assert "not a multiple" not in strata("plan", "collectives", "--ranks", "16", "--explain", "--size", "1MiB").stdout
    assert "domains of 3" in refused("plan", "collectives", "--ranks", "8", "--inside", "3").cause


def test_failures_plan_the_checkpoint_interval() -> None:
    found = answered("plan", "failures", "--gpus", "16384", "--model", "llama-3.1-405b", "--step", "20")
    assert 2.5 < found["mtbf_s"] / 3600 < 3.5  # Llama 3: 419 interruptions in 54 days
    spot = answered("plan", "failures", "--gpus", "64", "--state", "1TB", "--preemptions", "0.05", "--storage", "20GB/s")
    assert spot["spot_dollars_per_useful_hour"] < spot["dollars_per_useful_hour"]
    assert spot["save_s"] == 50


def test_replicas_grow_with_the_load() -> None:
    few, many = (
        answered("plan", "serve", "--model", "llama-3-8b", "--rate", rate)["aggregated"]["decode_replicas"]
        for rate in ("5", "500")
    )
    assert few < many


SEARCH = ["plan", "search", "--model", "llama-3-8b", "--gpus", "16,32", "--batch", "256"]


@pytest.mark.slow
def test_search_lists_the_best_layouts_and_the_pareto_front(tmp_path: Path) -> None:
    result = strata(*SEARCH, "--plot", str(tmp_path), "--json", str(tmp_path / "found.json"), "--tokens", "2T")
    assert result.exit_code == 0, result.output
    assert all(words in result.stdout for words in ("best layouts", "Pareto front", "layouts evaluated"))
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("pareto.png", "gpus.png"))
    best = json.loads((tmp_path / "found.json").read_text())["best"]
    steps = [one["step"]["seconds"] for one in best]
    assert steps == sorted(steps) and best[0]["layout"]["batch"] == 256
    assert best[0]["days"] == pytest.approx(2e12 / best[0]["step"]["tokens_per_s"] / 86400)


def test_a_found_layout_has_the_same_plan_by_hand() -> None:
    best = answered(*SEARCH)["best"][0]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in best["layout"].items() if name != "sequence_parallel"]
    options += ["--sequence-parallel"] if best["layout"]["sequence_parallel"] else []
    again = answered("plan", "--model", "llama-3-8b", *options)
    assert again["step"]["seconds"] == pytest.approx(best["step"]["seconds"])
    assert again["peak_bytes"] == pytest.approx(best["peak"]) and again["fits"]


def test_a_search_writes_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "found.yaml"
    result = strata(*SEARCH, "--write", str(recipe), "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 0 and f"written: {recipe}" in result.stdout
    best = json.loads((tmp_path / "found.json").read_text())["best"][0]
    assert answered("plan", "--recipe", str(recipe))["layout"] == best["layout"]
    assert "--program strata" in refused(*SEARCH, "--program", "megatron-core", "--precision", "fp8", "--write", str(recipe)).fix


def test_invalid_searches_are_refused() -> None:
    assert "both set" in refused(*SEARCH, "--batch-tokens", "4M").cause
    assert "not a count" in refused("plan", "search", "--model", "llama-3-8b", "--gpus", "some").cause
    assert "does not compute in fp8" in refused(*SEARCH, "--gpu", "a100", "--precision", "fp8").cause


def test_the_catalogue_is_listed() -> None:
    text = strata("plan", "list").stdout
    assert all(name in text for name in ("llama-3-70b", "deepseek-v3", "h100-sxm", "mi300x", "ndr-400", "megatron-core", "rsc-1"))
    assert set(answered("plan", "list", "gpus")) == {"gpus"}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], LLAMA])
def test_startup_is_fast(words: list[str]) -> None:
    assert starts_fast(STRATA, "plan", *words)


@pytest.mark.slow
def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from strata.platform.cli import build; from typer.testing import CliRunner;"
        f"assert CliRunner().invoke(build(), {['plan', *LLAMA]!r}).exit_code == 0;"
        "print([name for name in ('torch', 'ray', 'numpy', 'matplotlib', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
