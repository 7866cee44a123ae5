"""Plot of training and validation loss against the bigram baseline (`loss.png`)."""

from pathlib import Path

from strata.training.metrics.records import Record


def plot_losses(records: list[Record], bigram: float | None, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=0.8, alpha=0.7, label="training")
    evaluated = [r for r in records if "val_loss" in r]
    axes.plot([r["step"] for r in evaluated], [r["val_loss"] for r in evaluated], marker="o", label="validation")
    if bigram is not None:
        axes.axhline(bigram, color="gray", linestyle="--", label=f"bigram {bigram:.2f}")
    pictures = any("pictures_per_s" in r for r in records)
    axes.set(xlabel="step", ylabel="loss (squared error of the velocity)" if pictures else "loss (nats per token)")
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))
