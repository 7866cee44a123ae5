"""Property tests of all `strata plan` commands with random arguments and random config.json files.

Each command prints finite numbers or a one-line error with a fix, within a time limit, and never a traceback. Options are read
from the command tree, so new options are covered. STRATA_PLAN_EXAMPLES=20000 draws that many random examples instead of the
small fixed set.
"""

import io
import json
import math
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from strata.planner import ranges
from strata.planner.catalogue import library
from strata.planner.catalogue.fleets import FLEETS
from strata.planner.catalogue.software import PROGRAMS
from strata.planner.collectives import algorithms
from strata.platform import recipe_file
from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

MANY = os.environ.get("STRATA_PLAN_EXAMPLES")
SECONDS = 60.0  # of CPU time; the longest allowed search takes half of it on an idle core
SKIPPED = {"--measure", "--help"}  # start processes and print the help
SLOW = {"validate"}  # has no numeric options, and separate tests
SIGNED = {"pipeline bubble", "error", "signed", "lowest", "highest", "speedup_error", "worst"}  # may be negative

tree: Any = get_command(build())
plan: Any = tree.commands["plan"]
COMMANDS: dict[str, Any] = {"": plan, **{name: one for name, one in plan.commands.items() if name not in SLOW}}

drawn = settings(
    max_examples=int(MANY or 200),
    derandomize=MANY is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink] if MANY else [Phase.explicit, Phase.generate],
)

COUNTS = ["1", "2", "3", "4", "8", "12", "16", "64", "100", "512", "2048"]
BAD_COUNTS = ["0", "-1", "-8", "1000003", "100000000", "10000000000000", "1" + "0" * 30, "9" * 5000, "1.5", "nan", "inf", "x", ""]
FIGURES = ["0.01", "0.3", "0.9", "1", "2.5", "10", "60", "1000"]
BAD_FIGURES = ["0", "-0.0", "-1", "-1e9", "nan", "inf", "-inf", "1e-300", "1e-30", "1e9", "1e30", "1e308", "1e400", "x", ""]
BAD_WORDS = ["", " ", "x", "-", "0", "-1", "nan", "inf", "[/b]", "[bold]", "a/b", "é\n", "..", "/", "/dev/null", "x" * 400]
# Ends of all ranges. Values at the ends of an option's range must be accepted.
TABLES = (ranges.LAYOUT, ranges.SHAPE, ranges.EXPERTS, ranges.LATENT)
RANGES = [
    one for one in (*vars(ranges).values(), *(one for table in TABLES for one in table.values())) if isinstance(one, ranges.Range)
]
ENDS = sorted({end for one in RANGES for end in (one.least, one.most)})
BAD_COUNTS += [f"{end:.0f}" for end in ENDS if end == int(end)]
BAD_FIGURES += [f"{end!r}" for end in ENDS]
AMOUNTS = ["1T", "15T", "300B", "16M", "4096", "5.6TB", "200GB/s", "64KiB", "1e12"]
BAD_AMOUNTS = ["", "0", "-1", "-15T", "nan", "nanT", "inf", "1e400", "1e308T", "0.1", "1e-9", "1e40", "T", "GB", "many", "1,2"]
NAMES: dict[str, list[str]] = {
    "--gpu": hardware.gpu_names(),
    "--fabric": hardware.fabric_names(),
    "--program": list(PROGRAMS),
    "--fleet": list(FLEETS),
    "--recipe": recipe_file.names(),
    "--model": [*library.model_names(), *recipe_file.names()],
    "--show": [*algorithms.BY_NAME, "hierarchical"],
    **dict.fromkeys(("--tokens", "--storage", "--state", "--size", "--batch-tokens"), AMOUNTS),
}
OVERRIDES = ["model.layers=100000", "model.context=1000000000000", "train.batch=64", "train.micro_batch=0", "parallel.workers=8"]
OVERRIDES += ["parallel.zero=3", "model.vocab=.inf", "model=[", "train.steps=nan", "x", "model.heads=3", "model.moe=1", "="]
LISTS = ["8", "64", "1024", "512,1024", "8,16,24", "100000"]
BAD_LISTS = [",", "8,,", "0,8", "-8", "1.5", "nan", "1e30", ",".join(map(str, range(1, 100))), "8;16"]


def annotation(param: Any) -> Any:
    return param.type_descriptor.annotation


def values(command: str, param: Any, hostile: bool) -> st.SearchStrategy[str]:
    kind, option = annotation(param), param.opts[0]
    if kind is int:
        return st.sampled_from(BAD_COUNTS if hostile else COUNTS)
    if kind is float:
        return st.sampled_from(BAD_FIGURES if hostile else FIGURES)
    if get_args(kind):
        return st.just("nonsense") if hostile else st.sampled_from([str(one) for one in get_args(kind)])
    if kind is Path or option == "--json":
        return st.sampled_from(["/proc/no/such", "/dev/null/x", "", "[/b]", "x" * 400] if hostile else ["@", "@[/b]"])
    if option == "--gpus":
        return st.sampled_from(BAD_LISTS if hostile else LISTS)
    return st.sampled_from(
        (BAD_AMOUNTS if NAMES.get(option) is AMOUNTS else BAD_WORDS) if hostile else NAMES.get(option, BAD_WORDS)
    )


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command with some of its options, up to two of them invalid."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    params = [one for one in COMMANDS[name].params if one.opts[0] not in SKIPPED and one.param_type_name == "option"]
    often = draw(st.integers(1, 3))
    named = "--recipe" if name == "" and draw(st.integers(0, 3)) == 0 else "--model"
    params = [one for one in params if one.opts[0] not in ({"--recipe", "--model"} - {named})]
    chosen = [one for one in params if one.required or one.opts[0] == named or draw(st.integers(0, 9)) < often]
    hostile = draw(st.sets(st.integers(0, max(0, len(chosen) - 1)), max_size=2))
    if draw(st.booleans()):
        hostile = set()
    words = ["plan", *([name] if name else [])]
    for number, one in enumerate(chosen):
        if one.opts[0] == "--plot" and draw(st.integers(0, 9)):
            continue  # a plot takes half a second
        words.append(one.opts[0])
        if not one.is_flag:
            words.append(draw(values(name, one, number in hostile)))
    if named == "--recipe":
        words += draw(st.lists(st.sampled_from(OVERRIDES), max_size=2))
    return words


GROUPED = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
LATENT = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
GPT = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_inner": None, "vocab_size": 50257, "n_positions": 1024}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "gpt_neox": GROUPED,
    "gpt2": GPT,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 128},
    "qwen2_moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 5632, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen3_moe": GROUPED | EXPERTS | {"head_dim": 128, "mlp_only_layers": [0, 1]},
    "mixtral": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": GROUPED | LATENT,
    "deepseek_v3": GROUPED | LATENT | {"q_lora_rank": 1536},
}
ODD: list[Any] = [
    0,
    1,
    -1,
    2,
    3,
    7,
    129,
    1000,
    5040,
    65536,
    10**6,
    10**9,
    10**30,
    1.5,
    math.nan,
    math.inf,
    True,
    "8",
    "false",
    None,
]
ODD += [[], [1], [[0]], {}, {"a": 1}, *(int(end) for end in ENDS if end == int(end))]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def configs(draw: st.DrawFn) -> str:
    """A config.json: a valid file with some keys changed or removed, or arbitrary text."""
    if draw(st.integers(0, 9)) == 0:
        return draw(
            st.sampled_from(["", "{", "nonsense", "[" * 100_000, '{"model_type": ["llama"]}', "9" * 5000])
            | ANY_JSON.map(json.dumps)
        )
    family = draw(st.sampled_from(sorted(CONFIGS)))
    config = {"model_type": family, **CONFIGS[family]}
    for key in draw(st.sets(st.sampled_from(sorted(config)), max_size=2)):
        if draw(st.integers(0, 4)) == 0:
            del config[key]
        else:
            config[key] = draw(st.sampled_from(ODD))
    return json.dumps(config)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the CPU time, which other processes on the machine do not affect."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def numbers(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(found, list):
        for value in found:
            yield from numbers(value, path)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield path, found


def refuse_constant(word: str) -> float:
    raise AssertionError(f"{word} in the result")


POSITIVE = (
    "/step/seconds",
    "/tokens_per_s",
    "/peak_bytes",
    "/budget/dollars",
    "/budget/days",
    "/goodput",
    "/mtbf_s",
    "/gpus",
    "/itl_s",
)


def run(words: list[str]) -> tuple[int, str, UserError | None]:
    """Exit code, output, and the error that the command line would print."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            tree.main(words, prog_name="strata")
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue(), None
        except UserError as error:
            return 1, printed.getvalue(), error
    raise AssertionError("the command line returned without an exit code")


def try_out(words: list[str]) -> UserError | str:
    """The error, "refused" by the parser, or "answered"."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "answer.json"
        line = [word.replace("@", f"{folder}/", 1) if word.startswith("@") else word for word in words]
        if "--json" not in line:
            line += ["--json", str(target)]
        with within(SECONDS):
            code, printed, error = run(line)
        if error:
            for text in (error.cause, error.fix):
                assert text.strip() and "\n" not in text and len(text) < 2000, text
            return error
        if code == 2:  # not a number, or an unknown option: an error of the parser
            assert "Error" in printed or "Invalid" in printed, printed
            return "refused"
        assert code == 0, printed
        if target.exists():
            for path, value in numbers(json.loads(target.read_text(), parse_constant=refuse_constant)):
                assert math.isfinite(value), (path, value)
                if not any(key in SIGNED for key in path.split("/")):
                    assert value >= 0, (path, value)
                if path.endswith(POSITIVE):
                    assert value > 0, (path, value)
        return "answered"


@pytest.mark.slow
@drawn
@given(lines())
def test_a_random_command_line_is_answered_or_refused(words: list[str]) -> None:
    try_out(words)


@pytest.mark.slow
@drawn
@given(
    configs(),
    st.sampled_from(
        [
            ["plan", "--data", "8"],
            ["plan", "--tensor", "2", "--pipeline", "2", "--batch", "16", "--tokens", "1T"],
            ["plan", "serve"],
            ["plan", "serve", "--prompt", "100", "--output", "50", "--tensor", "8"],
            ["plan", "search", "--gpus", "64"],
            ["plan", "failures", "--gpus", "512"],
        ]
    ),
)
def test_a_random_config_is_read_or_refused(config: str, words: list[str]) -> None:
    with tempfile.TemporaryDirectory(suffix="[red]") as folder:
        (Path(folder) / "config.json").write_text(config)
        try_out([*words, "--model", folder])


BASES: dict[str, list[str]] = {
    "": ["plan", "--model", "llama-3-8b"],
    "search": ["plan", "search", "--model", "llama-3-8b", "--gpus", "8"],
    "serve": ["plan", "serve", "--model", "llama-3-8b"],
    "failures": ["plan", "failures", "--model", "llama-3-8b", "--gpus", "512"],
    "schedule": ["plan", "schedule"],
    "collectives": ["plan", "collectives"],
    "cluster": ["plan", "cluster", "--gpus", "512"],
    "queue": ["plan", "queue", "--gpus", "16", "--jobs", "50"],
    "dit": ["plan", "dit"],
    "list": ["plan", "list"],
}
NUMERIC = [(name, one) for name, command in COMMANDS.items() for one in command.params if annotation(one) in (int, float)]


@pytest.mark.slow
def test_every_option_has_a_range() -> None:
    """Options are read from the command tree, so new options are covered."""
    assert set(BASES) == set(COMMANDS)
    for name, param in NUMERIC:
        for value in ("nan", "inf", "-inf", "-1", "1e300" if annotation(param) is float else "1" + "0" * 30):
            words = [*BASES[name], param.opts[0], value]
            found = try_out(words)
            assert found != "answered", words
            if isinstance(found, UserError):
                assert param.opts[0] in found.cause and param.opts[0] in found.fix, words


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "failures", "--model", "llama-3-8b", "--gpus", "512", "--spares", "100000000"],
        ["plan", "search", "--model", "llama-3-8b", "--gpus", "8", "--seq", "0"],
        ["plan", "search", "--model", "llama-3-8b", "--gpus", "8", "--batch", "0"],
        ["plan", "search", "--model", "llama-3-8b", "--gpus", "8", "--tokens", ""],
        ["plan", "search", "--model", "llama-3-8b", "--gpus", "8", "--batch-tokens", "1"],
        ["plan", "search", "--model", "llama-3-8b", "--gpus", "8", "--deadline", "3"],
        ["plan", "--model", "llama-3-8b", "--interleave", "0"],
        ["plan", "--model", "llama-3-8b", "--program", ""],
        ["plan", "--model", "llama-3-8b", "--fabric", ""],
        ["plan", "--model", "llama-3-8b", "--storage", ""],
        ["plan", "--model", ""],
        ["plan", "--model", "x" * 5000],
        ["plan", "--recipe", "x" * 400],
        ["plan", "--recipe", "laptop", "model.layers=100000"],
        ["plan", "--recipe", "laptop", "train.batch=10000000000000"],
        ["plan", "schedule", "--interleave", "0"],
        ["plan", "schedule", "--stages", "256", "--micro-batches", "10000"],
        ["plan", "schedule", "--forward", "0", "--backward", "0", "--weight", "0"],
        ["plan", "collectives", "--ranks", "0"],
        ["plan", "collectives", "--inside", "0"],
        ["plan", "collectives", "--show", ""],
        ["plan", "collectives", "--measure", "--ranks", "1000"],
        ["plan", "failures", "--state", "1TB", "--model", "llama-3-8b", "--gpus", "8"],
        ["plan", "failures", "--gpus", "8"],
        ["plan", "failures", "--model", "llama-3-8b", "--gpus", "10000000", "--detect", "0", "--repair", "8760"],
    ],
)
def test_impossible_plans_are_refused(words: list[str]) -> None:
    assert isinstance(try_out(words), UserError)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--recipe", "--model"])
@pytest.mark.parametrize(("name", "text"), [("deep.yaml", "[" * 5_000), ("bytes.yaml", "\udcff"), ("list.yaml", "[1, 2]")])
def test_an_invalid_recipe_is_refused(tmp_path: Path, option: str, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert isinstance(try_out(["plan", option, str(tmp_path / name)]), UserError)


def test_a_config_that_never_ends_is_refused(tmp_path: Path) -> None:
    """Reading a named pipe would block forever, and a file of gigabytes would use all memory."""
    os.mkfifo(tmp_path / "config.json")
    assert isinstance(try_out(["plan", "--model", str(tmp_path)]), UserError)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(10 * 2**30)
    assert isinstance(try_out(["plan", "--model", str(tmp_path / "large.json")]), UserError)
