"""Units, ranges, worksheets and their output, with values on both sides of every limit."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from strata.planner import ranges
from strata.planner.catalogue.library import model
from strata.planner.cli import explain, options, output
from strata.planner.ranges import Range
from strata.planner.units import count, dollars, share, short, show, size
from strata.planner.worksheet import Line, Worksheet, evaluate
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

# Units


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1023, "B", "1,023 B"),
        (1024, "B", "1 KiB"),
        (2**20 - 1, "B", "1,024 KiB"),
        (2**20, "B", "1 MiB"),
        (1.5 * 2**30, "B", "1.5 GiB"),
        (-3 * 2**40, "B", "-3 TiB"),
        (5000 * 2**40, "B", "5,000 TiB"),
        (999, "B/s", "999 B/s"),
        (1e3, "B/s", "1 kB/s"),
        (2.5e6, "B/s", "2.5 MB/s"),
        (3e9, "W", "3 GW"),
        (4e12, "FLOP/s", "4 TFLOP/s"),
        (5e15, "FLOP/s", "5 PFLOP/s"),
        (6e18, "FLOP/s", "6 EFLOP/s"),
        (1.0, "s", "1 s"),
        (0.999, "s", "999 ms"),
        (1e-3, "s", "1 ms"),
        (0.5e-3, "s", "500 µs"),
        (2e-6, "s", "2 µs"),
        (119.0, "s", "119 s"),
        (120.0, "s", "2 min"),
        (7199.0, "s", "120 min"),
        (7200.0, "s", "2 h"),
        (172799.0, "s", "48 h"),
        (172800.0, "s", "2 days"),
        (-240.0, "s", "-4 min"),
        (12.0, "", "12"),
        (1234567.0, "", "1,234,567"),
        (1e15, "", "1e+15"),
        (-1e15, "", "-1e+15"),
        (0.12345, "", "0.123"),
        (12.5, "$", "$12.50"),
    ],
)
def test_quantities_as_text(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text


def test_digits_of_quantities() -> None:
    assert show(1.23456, "s", 5) == "1.2346 s" and show(1.23456, "", 5) == "1.2346"
    assert show(999.4, "s") == "16.7 min" and show(1000 * 2**40, "B") == "1,000 TiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "$0.50"),
        (999.99, "$999.99"),
        (1000.0, "$1,000"),
        (-1000.4, "$-1,000"),
        (999_999.0, "$999,999"),
        (1e6, "$1.00M"),
        (-2.5e9, "$-2,500.00M"),
    ],
)
def test_dollars(value: float, text: str) -> None:
    assert dollars(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(999, "999"), (1e3, "1K"), (1.5e6, "1.5M"), (70.6e9, "70.6B"), (15e12, "15T"), (999e9, "999B"), (0.5, "0.5")],
)
def test_short_counts(value: float, text: str) -> None:
    assert short(value) == text


def test_shares() -> None:
    assert share(0.12345) == "12.3%"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8K", 8e3),
        ("16m", 16e6),
        ("300B", 300e9),
        ("2G", 2e9),
        ("15T", 15e12),
        (" 4_096 ", 4096),
        ("8,192", 8192),
        ("1e12", 1e12),
        ("1", 1.0),
        ("1e18", 1e18),
    ],
)
def test_counts_are_parsed(text: str, value: float) -> None:
    assert count(text, "--tokens") == value


@pytest.mark.parametrize("text", ["", "T", "many", "1X", "nan", "0.5", "2000000T", "-3"])
def test_invalid_counts_name_their_option(text: str) -> None:
    with pytest.raises(UserError, match="--tokens"):
        count(text, "--tokens")


def test_counts_have_the_range_of_their_option() -> None:
    assert count("5", "--gpus", Range(2, 5)) == 5
    with pytest.raises(UserError, match="6 is out of range"):
        count("6", "--gpus", Range(2, 5))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20GB/s", 20e9),
        ("1.5TB", 1.5e12),
        ("3MB", 3e6),
        ("4kB", 4e3),
        ("64KiB", 65536),
        ("2MiB", 2 * 2**20),
        ("3Gi", 3 * 2**30),
        ("1TiB/s", 2**40),
        ("2e9", 2e9),
        ("512B", 512),
        ("7", 7),
    ],
)
def test_sizes_are_parsed(text: str, value: float) -> None:
    assert size(text, "--storage") == value


@pytest.mark.parametrize("text", ["", "GB", "i", "5iB", "fast", "0", "2000000TB"])
def test_invalid_sizes_name_their_option(text: str) -> None:
    with pytest.raises(UserError, match="--storage"):
        size(text, "--storage")


# Ranges


@pytest.mark.parametrize(
    ("within", "value", "inside"),
    [
        (Range(1, 5), 1, True),
        (Range(1, 5), 0.999, False),
        (Range(1, 5), 5, True),
        (Range(1, 5), 5.001, False),
        (Range(1, 5, above=True), 1, False),
        (Range(1, 5, above=True), 1.001, True),
        (Range(1, 5, above=True), 5, True),
        (Range(1, 5), math.nan, False),
        (Range(1, 5, above=True), math.nan, False),
    ],
)
def test_ends_of_ranges(within: Range, value: float, inside: bool) -> None:
    assert (value in within) == inside


@pytest.mark.parametrize(
    ("within", "text"),
    [
        (Range(1, 10_000_000), "1 to 10,000,000"),
        (Range(0, 100, above=True), "more than 0 to 100"),
        (Range(1e-6, 0.999), "1e-06 to 0.999"),
        (Range(1, 999_999_999), "1 to 999,999,999"),
        (Range(1, 1_000_000_000), "1 to 1e+09"),
        (Range(-1e9, 1), "-1e+09 to 1"),
    ],
)
def test_ranges_as_text(within: Range, text: str) -> None:
    assert str(within) == text


def test_values_out_of_range_are_shown_as_written() -> None:
    Range(1, 5).check("--x", 5)
    with pytest.raises(UserError) as error:
        Range(1, 5).check("--x", 6000, "6K")
    assert error.value.cause == "--x 6K is out of range." and "1 to 5" in error.value.fix
    with pytest.raises(UserError, match="--x 6 is out of range"):
        Range(1, 5).check("--x", 6)


# The documented ranges of every input number: least, most, and whether the least itself is excluded.
RANGES = {
    "GPUS": (1, 10_000_000, False),
    "SEQUENCE": (1, 100_000_000, False),
    "BATCH": (1, 1_000_000_000, False),
    "TOKENS": (1, 1e18, False),
    "BYTES": (1, 1e18, False),
    "PRICE": (0, 100_000, True),
    "STAGES": (1, 256, False),
    "MICRO_BATCHES": (1, 10_000, False),
    "SECONDS": (0, 1_000_000, False),
    "SOME_SECONDS": (1e-9, 1_000_000, False),
    "SPARES": (0, 1_000_000, False),
    "DETECT": (0, 7 * 24 * 3600, False),
    "REPAIR": (0, 365 * 24, False),
    "STEP": (1e-6, 10_000_000, False),
    "PREEMPTIONS": (0, 3600, False),
    "SPOT_PRICE": (0, 100, True),
    "RATE": (1e-6, 1_000_000, False),
    "CACHED": (0, 0.999, False),
    "VARIATION": (0, 100, False),
    "TTFT": (1e-6, 24 * 3600, False),
    "ITL": (1e-6, 3600, False),
    "MAX_SEQUENCES": (1, 1_000_000, False),
    "TOP": (1, 200, False),
    "DEADLINE": (0, 1_000_000, True),
    "RANKS": (2, 10_000_000, False),
    "INSIDE": (1, 2**16, False),
    "PROCESSES": (2, 16, False),
    "QUEUE_GPUS": (1, 262_144, False),
    "JOBS": (1, 1_000_000, False),
    "LOAD": (0.01, 10, False),
    "SEED": (0, 4_294_967_296, False),
    "NODE_GPUS": (1, 64, False),
    "BLOCK": (1, 4096, False),
    "PAUSE": (0, 86_400, False),
    "AGEING": (0, 8760, False),
    "FLEET_GPUS": (1, 1_000_000, False),
    "RETENTION": (0, 3650, True),
    "SCRAPE": (1, 3600, False),
    "STALLED": (1e-6, 0.5, False),
    "CHECKPOINTS": (1, 10_000, False),
}
TABLES = {
    "LAYOUT": {
        "data": (1, 10_000_000),
        "tensor": (1, 2**16),
        "pipeline": (1, 256),
        "sequence": (1, 2**16),
        "context": (1, 2**16),
        "expert": (1, 2**16),
        "interleave": (1, 256),
        "zero": (0, 3),
        "micro_batch": (1, 1_000_000),
        "batch": (1, 1_000_000_000),
    },
    "SHAPE": {
        "layers": (1, 1000),
        "hidden": (1, 1_000_000),
        "heads": (1, 2**16),
        "kv_heads": (1, 2**16),
        "head_dim": (1, 2**16),
        "ffn": (1, 10_000_000),
        "vocab": (1, 100_000_000),
        "context": (1, 100_000_000),
    },
    "EXPERTS": {
        "count": (1, 2**16),
        "top_k": (1, 2**16),
        "ffn": (1, 10_000_000),
        "shared_ffn": (0, 10_000_000),
        "dense_layers": (0, 1000),
    },
    "LATENT": {
        "query_rank": (0, 1_000_000),
        "kv_rank": (1, 1_000_000),
        "plain_dim": (1, 2**16),
        "rotary_dim": (0, 2**16),
        "value_dim": (1, 2**16),
    },
}


def test_documented_ranges() -> None:
    found = {name: one for name, one in vars(ranges).items() if isinstance(one, Range)}
    assert {name: (one.least, one.most, one.above) for name, one in found.items()} == RANGES
    for name, table in TABLES.items():
        assert {each: (one.least, one.most) for each, one in getattr(ranges, name).items()} == table
        assert not any(one.above for one in getattr(ranges, name).values())
    assert (ranges.OPERATIONS, ranges.CHOICES) == (50_000, 32)


# Worksheets


def nested() -> Worksheet:
    """A worksheet with a part that reuses a name, and a part of that part."""
    top = Worksheet("top")
    top.given("tokens", 12.0, "", "given")
    top.work_out("half", "tokens / 2", "s", "a half")
    inner = top.part("inner")
    inner.work_out("tokens", "tokens + half")
    inner.work_out("twice", "max(2 * tokens, floor(half))", "B")
    inner.part("innermost").work_out("all", "twice + tokens + half")
    top.part("empty")
    return top


def test_parts_see_the_lines_before_them() -> None:
    top = nested()
    inner = top.parts[0]
    assert (top["tokens"], top["half"], inner["tokens"], inner["twice"], inner.parts[0]["all"]) == (12, 6, 18, 36, 60)
    assert "twice" in inner and "twice" not in top
    assert [(depth, part.title) for depth, part in top.walk()] == [(0, "top"), (1, "inner"), (2, "innermost"), (1, "empty")]
    assert top.lines[0] == Line("tokens", 12.0, "", None, "given")
    assert top.lines[1] == Line("half", 6.0, "s", "tokens / 2", "a half")


@pytest.mark.parametrize(
    ("formula", "value"),
    [("ceil(x / 2)", 4), ("floor(x / 2)", 3), ("sqrt(x + 2)", 3), ("log2(x + 1)", 3), ("exp(log(x))", 7), ("min(x, 3)", 3)],
)
def test_functions_of_formulas(formula: str, value: float) -> None:
    assert evaluate(formula, {"x": 7}) == pytest.approx(value)


def test_formulas_have_no_builtins() -> None:
    with pytest.raises(NameError):
        evaluate("len('x')", {})


def test_a_worked_out_line_is_a_float() -> None:
    value = Worksheet("w").work_out("x", "ceil(1.5)")
    assert isinstance(value, float) and value == 2


def test_substituted_values_are_those_at_the_time() -> None:
    """The second `tokens` is worked out of the outer one, and later lines use the inner."""
    top = nested()
    inner = top.parts[0]
    assert [filled for _, filled in explain.substituted(top)] == [None, "12 / 2"]
    assert [filled for _, filled in explain.substituted(inner, top)] == ["12 + 6", "max(2 * 18, floor(6))"]
    assert [filled for _, filled in explain.substituted(inner.parts[0], inner)] == ["36 + 18 + 6"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.0, "3"), (-2.0, "-2"), (1e14, "1" + "0" * 14), (1e15, "1e+15"), (-1e15, "-1e+15"), (1 / 3, "0.3333333")],
)
def test_plain_values(value: float, text: str) -> None:
    assert explain.plain(value) == text


def test_an_explanation_as_text() -> None:
    assert explain.as_text(nested()).plain.splitlines() == [
        "top",
        "  tokens = 12   given",
        "  half = 6 s   a half",
        "      = tokens / 2",
        "      = 12 / 2",
        "  inner",
        "    tokens = 18",
        "        = tokens + half",
        "        = 12 + 6",
        "    twice = 36 B",
        "        = max(2 * tokens, floor(half))",
        "        = max(2 * 18, floor(6))",
        "    innermost",
        "      all = 60",
        "          = twice + tokens + half",
        "          = 36 + 18 + 6",
    ]


def test_a_formula_without_names_is_printed_once() -> None:
    top = Worksheet("top")
    top.work_out("x", "2 + 3")
    assert explain.as_text(top).plain.splitlines() == ["top", "  x = 5", "      = 2 + 3"]


def test_a_worksheet_with_parts_only_has_its_title() -> None:
    top = Worksheet("top")
    top.part("inner").given("x", 1.0)
    assert explain.as_text(top).plain.splitlines() == ["top", "  inner", "    x = 1"]


def test_an_explanation_as_json() -> None:
    found = explain.as_json(nested())
    assert found["lines"][1] == {"name": "half", "value": 6.0, "unit": "s", "formula": "tokens / 2", "why": "a half"}
    assert [part["title"] for part in found["parts"]] == ["inner", "empty"] and found["parts"][0]["parts"][0][
        "title"
    ] == "innermost"


# Output


@dataclass(frozen=True)
class Result:
    figures: tuple[float, ...]
    by_name: dict[int, float]
    worksheet: Worksheet


def test_results_as_json() -> None:
    found = output.jsonable(Result((1.0, 2.0), {3: 4.0}, Worksheet("left out")))
    assert found == {"figures": [1.0, 2.0], "by_name": {"3": 4.0}}
    assert output.jsonable(Result) is Result  # a class is no result
    assert sorted(output.jsonable({1, 2})) == [1, 2] and output.jsonable(frozenset({1})) == [1]
    assert output.jsonable("text") == "text" and output.jsonable(7) == 7


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_results_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="not a finite number"):
        output.jsonable({"deep": [value]})


def test_json_is_written_to_a_file_or_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output.write_json({"a": 1}, "-")
    assert capsys.readouterr().out == '{\n  "a": 1\n}\n'
    output.write_json({"a": 1}, str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1} and capsys.readouterr().out == ""
    with pytest.raises(UserError, match="cannot be written: No such file"):
        output.write_json({}, str(tmp_path / "no" / "x.json"))


def test_plot_folders_are_created(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert output.plot_folder(folder) == folder and folder.is_dir()
    assert output.plot_folder(folder) == folder
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        output.plot_folder(tmp_path / "file" / "x")


def test_tables_in_a_file_have_130_columns(capsys: pytest.CaptureFixture[str]) -> None:
    out = output.console()
    assert out.width == 130 and not out.is_terminal
    out.print("[bold]x[/bold] :smile: 3")
    assert capsys.readouterr().out == "[bold]x[/bold] :smile: 3\n"


# Options


@pytest.mark.parametrize(
    ("gpu", "fabric"),
    [
        ("v100-32gb", "edr-100"),
        ("a100-40gb", "hdr-200"),
        ("gb200", "ndr-400-nvl72"),
        ("ascend-910b", "roce-200"),
        ("h100-sxm", "ndr-400"),
        ("b200", "ndr-400"),
    ],
)
def test_default_fabrics(gpu: str, fabric: str) -> None:
    assert options.open_fabric(None, hardware.gpu(gpu)).name == fabric
    assert options.open_fabric("roce-400", hardware.gpu(gpu)).name == "roce-400"


def test_a_price_replaces_that_of_the_catalogue() -> None:
    assert options.open_gpu("h100", None) == hardware.gpu("h100")
    assert options.open_gpu("h100", 0.5).dollars_per_hour == 0.5


def test_default_sequences_end_at_8192() -> None:
    assert options.usual_sequence(model("gpt-3-175b")) == 2048
    assert options.usual_sequence(model("llama-3.1-8b")) == 8192


def test_default_chunks_of_schedules() -> None:
    assert [options.chunks_of(name, None) for name in ("1f1b", "interleaved", "zbv", "dualpipe")] == [1, 2, 2, 1]
    assert options.chunks_of("interleaved", 5) == 5 and options.chunks_of("1f1b", 3) == 3


def answered(capsys: pytest.CaptureFixture[str], **given: object) -> str:
    worksheet = Worksheet("the worksheet")
    worksheet.given("x", 3.0)
    options.answer(lambda out: ["a table"], lambda: {"a": 1.0}, worksheet=worksheet, **given)  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_answers_have_tables_explanations_and_written_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, folder = tmp_path / "x.json", tmp_path / "plots"

    def draw(into: Path) -> list[Path]:
        return [into / "p.png"]

    assert answered(capsys, json=None) == "a table\n\n"
    assert answered(capsys, json=None, explain=True) == "a table\n\nthe worksheet\n  x = 3\n\n"
    text = answered(capsys, json=str(target), plot=folder, draw=draw, written=[Path("w.yaml")])
    assert text == f"a table\n\nwritten: w.yaml\nwritten: {target}\nwritten: {folder / 'p.png'}\n"
    assert json.loads(target.read_text()) == {"a": 1.0} and folder.is_dir()
    assert json.loads(answered(capsys, json="-")) == {"a": 1.0}
    explained = json.loads(answered(capsys, json="-", explain=True))
    assert explained["explain"]["title"] == "the worksheet" and explained["a"] == 1.0
    assert "written" not in answered(capsys, json=None, plot=folder) and "written" not in answered(capsys, json=None, draw=draw)
    with pytest.raises(UserError, match="not a finite number"):
        options.answer(lambda out: [], lambda: {"a": math.inf}, None)


def test_consoles_of_a_terminal_follow_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "77")
    assert output.console().width == 77
