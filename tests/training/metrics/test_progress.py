import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from strata.training.metrics import progress as module
from strata.training.metrics.progress import TrainingProgress
from strata.training.metrics.records import Record
from strata.training.metrics.startup import Startup


def record(step: int, **more: object) -> Record:
    return Record(step=step, loss=3.25, lr=0.1, grad_norm=1.0, tokens_per_s=1234.0, time=0.0, **more)  # type: ignore[typeddict-item]


def shown(terminal: bool) -> str:
    output = io.StringIO()
    with TrainingProgress(Console(file=output, force_terminal=terminal, width=160), 40) as progress:
        progress.show(record(10))
        progress.show(record(11))
        progress.show(record(20, val_loss=3.5, mfu=0.12, seconds={"data": 1.0, "forward": 3.0}, peak_memory_bytes=2**31))
    return output.getvalue()


def test_log_has_a_line_at_intervals_and_at_each_evaluation() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "step 10/40  loss 3.250  gradient 1.00  lr 1.0e-01  1,234 tokens/s"
    assert lines[1] == (
        "step 20/40  loss 3.250  gradient 1.00  lr 1.0e-01  1,234 tokens/s  MFU 12%  "
        "validation 3.500 (perplexity 33.12)  data 25%, forward 75%  2.0 GiB"
    )
    assert len([line for line in lines if line]) == 2


def test_terminal_has_a_bar() -> None:
    output = shown(terminal=True)
    assert "20/40" in output and "1,234 tokens/s" in output and "━" in output


def test_first_step_prints_the_startup_phases() -> None:
    startup, output = Startup(began=100.0), io.StringIO()
    startup.done("corpus", 101.5)
    with TrainingProgress(Console(file=output, width=160), 40, startup) as progress:
        progress.show(record(10) | {"time": 99.0})  # type: ignore[arg-type]  # from before a resume
        assert "first step" not in output.getvalue()
        progress.show(record(11) | {"time": 112.0})  # type: ignore[arg-type]
        progress.show(record(12, val_loss=3.5) | {"time": 113.0})  # type: ignore[arg-type]
    assert "validation 3.500 (perplexity 33.12)  after 13 s\n" in output.getvalue()
    assert output.getvalue().count("first step") == 1
    assert "first step after 12.0 s (corpus 1.5 · workers 10.5), " in output.getvalue()
    assert "s of processor time" in output.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_log_lines_are_ten_seconds_apart(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """An evaluation has a line of its own and starts the interval again. A terminal has lines for evaluations only."""
    now, output = 0.0, io.StringIO()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    progress = TrainingProgress(Console(file=output, force_terminal=terminal, width=160, highlight=False), 40)
    for step, now in enumerate((0.0, 9.0, 10.0, 19.5, 20.0), 1):  # noqa: B007
        progress.show(record(step))
    now = 25.0
    progress.show(record(6, val_loss=3.5))
    for step, now in ((7, 34.5), (8, 35.0)):  # noqa: B007
        progress.show(record(step))
    shown = [line.split("/")[0] for line in output.getvalue().splitlines() if line.startswith("step")]
    assert shown == (["step 6"] if terminal else ["step 1", "step 3", "step 5", "step 6", "step 8"])


def test_startup_is_not_shown_for_a_step_at_its_beginning() -> None:
    output = io.StringIO()
    progress = TrainingProgress(Console(file=output, width=160), 40, Startup(began=100.0))
    progress.show(record(1) | {"time": 100.0})  # type: ignore[arg-type]
    assert "first step" not in output.getvalue()
    progress.show(record(2) | {"time": 100.5})  # type: ignore[arg-type]
    assert "first step after 0.5 s (workers 0.5)" in output.getvalue()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "  validation 3.500 (perplexity 33.12)"),
        ({"seconds": {}}, "  validation 3.500 (perplexity 33.12)"),
        ({"seconds": {"data": 0.0}}, "  validation 3.500 (perplexity 33.12)"),
        ({"seconds": {"data": 0.5, "forward": 1.5}}, "  validation 3.500 (perplexity 33.12)  data 25%, forward 75%"),
        ({"peak_memory_bytes": 3 * 2**29}, "  validation 3.500 (perplexity 33.12)  1.5 GiB"),
    ],
)
def test_details_of_an_evaluation(more: dict[str, object], text: str) -> None:
    assert module._details(record(1, val_loss=3.5, **more)) == text


@pytest.mark.parametrize(
    ("loss", "text"), [(0.0, "1"), (math.log(12340.0), "1.234e+04"), (1000.0, "inf"), (math.nan, "nan"), (-1000.0, "0")]
)
def test_perplexity_of_extreme_losses(loss: float, text: str) -> None:
    assert f"(perplexity {text})" in module._details(record(1, val_loss=loss))


def test_loss_of_preferences_has_no_perplexity() -> None:
    assert module._details(record(1, val_loss=0.5, preference={"margin": 1.0})) == "  validation 0.500"


def test_agreement_with_a_teacher_is_shown() -> None:
    details = module._details(record(1, val_loss=0.0, distillation={"kl": 0.5, "agreement": 0.756}))
    assert details == "  validation 0.000 (perplexity 1)  agrees with the teacher 75.6%"


def test_note_omits_unknown_values() -> None:
    plain = record(1) | {"grad_norm": None}
    assert module._note(plain) == "loss 3.250  lr 1.0e-01  1,234 tokens/s"  # type: ignore[arg-type]
    assert module._note(record(1, mfu=0.456)).endswith("1,234 tokens/s  MFU 46%")
