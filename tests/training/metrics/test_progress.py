import io

from rich.console import Console

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
        "validation 3.500  data 25%, forward 75%  2.0 GiB"
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
        progress.show(record(12) | {"time": 113.0})  # type: ignore[arg-type]
    assert output.getvalue().count("first step") == 1
    assert "first step after 12.0 s (corpus 1.5 · workers 10.5), " in output.getvalue()
    assert "s of processor time" in output.getvalue()
