"""Model that is quantized: the export of a run, or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

from strata.platform import runs
from strata.platform.errors import UserError, shown
from strata.platform.model_families.source import read_config
from strata.platform.runs import Run
from strata.training.quantization.formats import Format

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Source:
    name: str
    folder: Path
    run: Run | None = None

    def target(self, format: Format) -> Path:
        """Default of `--to`: in the folder of a run, or beside a model folder."""
        return (self.run.path if self.run else self.folder.resolve().parent) / f"{self.name}-{format.name}"


def resolve(name: str) -> Source:
    """Source of a run's name or a folder, in this order. A name with a slash in it is never a run's."""
    if runs.exists(name):
        run = runs.find(name)
        if not run.has_export():
            raise UserError(f"Run '{name}' has no export to quantize.", f"Export its newest checkpoint: strata export {name}")
        if (run.export / "model_index.json").is_file():
            raise UserError(f"Run '{name}' has a model of pictures.", "Quantize a model of text.")
        return Source(name, run.export, run)
    folder = Path(name)
    if not folder.is_dir():
        if "/" in name:
            raise UserError(f"There is no folder {shown(name, 200)}.", "Name a run, or a Hugging Face folder.")
        runs.find(name)  # raises, with the nearest name
    return Source(folder.resolve().name, folder)


def require_supported(folder: Path) -> None:
    """Refuses by the configuration, before the weights are read."""
    values = read_config(str(folder))
    if "quantization_config" in values or "compression_config" in values:
        config = values.get("quantization_config") or values.get("compression_config")
        method = config.get("quant_method") if isinstance(config, dict) else None
        raise _refused(folder, f"it is quantized already ({shown(method or 'by another program')})", "Use its original weights.")
    if "text_config" in values:
        raise _refused(folder, "it is multimodal", "Use a model of text, such as those of docs/models.md.")
    experts = next((key for key in EXPERTS if (values.get(key) or 0) > 1), None)
    if experts:
        cause = f"it is a mixture of experts ({experts}={values[experts]}), whose experts are not linear layers in transformers"
        raise _refused(folder, cause, "Use a dense model, or llm-compressor in an environment of its own.")


def _refused(folder: Path, reason: str, fix: str) -> UserError:
    return UserError(f"The model in {folder} cannot be quantized: {reason}.", fix)
