import io

from rich.console import Console

from strata.training.progress import TrainingProgress
from strata.training.records import Record


def record(step: int, **more: float) -> Record:
    return Record(step=step, loss=3.25, lr=0.1, grad_norm=1.0, tokens_per_s=1234.0, time=0.0, **more)  # type: ignore[typeddict-item]


def shown(terminal: bool) -> str:
    output = io.StringIO()
    with TrainingProgress(Console(file=output, force_terminal=terminal, width=120), 40) as progress:
        progress.show(record(10))
        progress.show(record(11))
        progress.show(record(20, val_loss=3.5))
    return output.getvalue()


def test_log_has_a_line_now_and_then_and_at_each_evaluation() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "step 10/40  loss 3.250  1,234 tokens/s"
    assert lines[1] == "step 20/40  loss 3.250  1,234 tokens/s  validation 3.500"
    assert len([line for line in lines if line]) == 2


def test_terminal_has_a_bar() -> None:
    output = shown(terminal=True)
    assert "20/40" in output and "1,234 tokens/s" in output and "━" in output
