"""Prices of GPUs: the file that users edit, and the rules that are generated from it."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from strata.dashboards import commands, generate, prices
from strata.dashboards.prices import Prices
from strata.platform.errors import UserError


def test_committed_rules_are_those_of_the_price_file(root: Path) -> None:
    assert (root / prices.RULES).read_text() == prices.rules_text(prices.read(root / prices.FILE)), (
        "run 'strata dashboards build'"
    )


@pytest.mark.parametrize(
    ("words", "name", "matches"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H20", "NVIDIA H200", False),
        ("H20", "NVIDIA H20", True),
        ("L4", "NVIDIA L40S", False),
        ("L4", "L4", True),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("H200", "NVIDIA GH200 480GB", False),
        ("h100 pcie", "NVIDIA H100 PCIe", True),
        ("RTX 6000", "NVIDIA RTX 6000 Ada Generation", True),
        ("MI3.0", "AMD MI300", False),
    ],
)
def test_keys_match_whole_words_of_the_name(words: str, name: str, matches: bool) -> None:
    """Prometheus anchors a pattern at both ends."""
    [rule] = prices.rules(Prices(per_gpu_hour={words: 1.0}, other=2.0))["groups"][0]["rules"]
    pattern = re.search(r'name=~"(.*?)"\}', rule["expr"])
    assert pattern is not None
    assert bool(re.fullmatch(pattern[1], name)) == matches


def test_the_first_price_wins_and_the_last_is_for_the_rest() -> None:
    [rule] = prices.rules(Prices(per_gpu_hour={"H100 PCIe": 1.5, "H100": 2.5}, other=0.25))["groups"][0]["rules"]
    first, second, rest = rule["expr"].split("\nor ")
    assert "H100 PCIe" in first and first.endswith("* 1.5") and second.endswith("* 2.5")
    assert rest == "group by (name) (strata:team_gpu_hours:sum5m) * 0.25"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("per_gpu_hour: {H100: 3}", "wrong at other"),
        ("{per_gpu_hour: {H100: -1}, other: 1}", "wrong at per_gpu_hour.H100"),
        ("{per_gpu_hour: {H100: .inf}, other: 1}", "wrong at per_gpu_hour.H100"),
        ("{per_gpu_hour: {'H\"}': 1}, other: 1}", "wrong at per_gpu_hour"),
        ("{per_gpu_hour: {'': 1}, other: 1}", "wrong at per_gpu_hour"),
        ("{other: 1, default: 2}", "wrong at default"),
        ("", "wrong at the whole file"),
        ("other: [", "is not YAML"),
        ("other: cheap", "wrong at other"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, cause: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(cause)):
        prices.read(file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        prices.read(tmp_path / "prices.yaml")


def test_build_reads_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / generate.JSON).mkdir(parents=True)
    (tmp_path / "mine.yaml").write_text("other: 7.5")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "write", lambda price_file: _write(tmp_path, price_file))
    app = typer.Typer()
    app.command()(commands.dashboards_build)
    done = CliRunner().invoke(app, ["--prices", str(tmp_path / "mine.yaml")])
    assert done.exit_code == 0, done.output
    assert "infra/prometheus/rules/prices.yaml" in done.output and "strata.monitoring.prometheus.manifests" in done.output
    assert "* 7.5" in (tmp_path / prices.RULES).read_text()


WRITE = generate.write


def _write(root: Path, price_file: Path) -> list[Path]:
    return WRITE(root, price_file)
