from pathlib import Path

from strata.training.metrics.plot import plot_losses
from strata.training.metrics.records import Record


def test_png_is_written(tmp_path: Path) -> None:
    records = [Record(step=s, loss=5 / s, lr=0.1, grad_norm=1.0, tokens_per_s=1.0, time=0.0, val_loss=5.5 / s) for s in (1, 2, 3)]
    plot_losses(records, 3.0, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
