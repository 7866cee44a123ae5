"""`strata data preview` on a terminal and in a pipe."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.training.data import preview
from strata.training.data.command import data_preview

from . import tiny
from .tiny import assistant, user, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizer"), tiny.CHATML)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"messages": [user(f"What is {n}?"), assistant("It is [bold]4[/bold].")]} for n in range(6)]
    return write_jsonl(tmp_path / "a.jsonl", rows)


def run(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(data_preview)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_row_in_a_pipe(tokenizer: Path, data: Path) -> None:
    output = run(f"data.path={data}", "data.kind=chat", "model.context=128", "--tokenizer", tokenizer)
    assert "── document 0 · positions 0 to " in output and f"line 1 of {data}" in output
    assert "<|im_start|>assistant\n⟦It is [bold]4[/bold].<|im_end|>⟧\n" in output
    assert "── padding · positions 0 to " in output and "nothing counts" in output
    lines = output.splitlines()
    [line] = [line for line in lines if line.startswith("row 0 of ")]
    assert "of 128 tokens (" in line and "% full)" in line and " count (" in line
    [total] = [line.split() for line in lines if line.split()[:3] == ["a.jsonl", "chat", "train"]]
    assert int(total[3]) == int(total[5]) and total[7].endswith("%") and "\x1b" not in output


def test_rows_can_be_chosen(tokenizer: Path, data: Path) -> None:
    options = [f"data.path={data}", "data.kind=chat", "data.pack=false", "model.context=64", "--tokenizer", tokenizer]
    assert run(*options, "--row", 1) != run(*options, "--row", 0)
    with pytest.raises(UserError, match=r"There is no row 5: the training split has 5") as raised:
        run(*options, "--row", 5)
    assert raised.value.fix == "Pass a row from 0 to 4."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, tokenizer: Path, data: Path, plain: bool = False, **more: Any) -> str:
    output = Terminal()
    console = Console(file=output, highlight=False, soft_wrap=True, color_system="standard", **more)
    monkeypatch.setattr(preview, "Console", lambda **_: console)
    from strata.platform.recipe import DataSection

    preview.preview(DataSection(path=data, kind="chat"), tokenizer, 64, 0, plain)
    return output.getvalue()


def test_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tokenizer: Path, data: Path) -> None:
    coloured = shown(monkeypatch, tokenizer, data, force_terminal=True)
    assert "\x1b[1;32mIt is [bold]4[/bold].<|im_end|>\x1b[0m" in coloured and preview.OPEN not in coloured
    for output in (
        shown(monkeypatch, tokenizer, data, plain=True, force_terminal=True),
        shown(monkeypatch, tokenizer, data, no_color=True, force_terminal=True),
        shown(monkeypatch, tokenizer, data, force_terminal=False),
    ):
        assert "⟦It is [bold]4[/bold].<|im_end|>⟧" in output


def test_pairs_and_labels_are_titled(tokenizer: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": [user(f"{n}?")], "chosen": [assistant("a")], "rejected": [assistant("b")]} for n in range(3)]
    common = ["data.kind=preference", "model.context=128", "--tokenizer", tokenizer]
    output = run(f"data.path={write_jsonl(tmp_path / 'p.jsonl', pairs)}", *common)
    assert "── pair 0 chosen · " in output and "── pair 1 rejected · " in output
    labels = [{"prompt": f"{n}?", "completion": "a", "label": True} for n in range(3)]
    output = run(f"data.path={write_jsonl(tmp_path / 'l.jsonl', labels)}", *common)
    assert "── document 1 (good) · " in output and "(bad)" not in output


def test_tokenizer_comes_from_the_model(tokenizer: Path, data: Path) -> None:
    options = [f"data.path={data}", "data.kind=chat", "model.context=64"]
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tokenizer / "config.json").write_text(json.dumps(config))
    assert "⟦It is" in run(*options, f"model.from={tokenizer}")
    with pytest.raises(UserError, match=r"The recipe has no model.from, so there is no tokenizer"):
        run(*options)
