"""Adapter in peft's format, served on the base model beside which it was trained (`serve.adapter=apart`)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError, shown
from strata.platform.model_families import source
from strata.platform.recipe import ServeSection
from strata.serving.models import model_dir

BASE = "base"  # name of the base model in the API
FOLDER = "adapter"  # in an export, beside the merged model
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # bounds that vLLM allocates for
# Keys of peft's configuration that vLLM does not read, or refuses only after the engine has started.
UNSUPPORTED = (
    *("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "layer_replication", "target_parameters"),
    "trainable_token_indices",
)
MERGED = "Serve the merged model: serve.adapter=merged."


@dataclass(frozen=True)
class Adapter:
    folder: Path
    base: Path  # model folder
    rank_bound: int  # `max_lora_rank` of vLLM


def names(section: ServeSection, model_id: str) -> tuple[str, ...]:
    """Names that requests may give as `model`. Requests without one get the first."""
    if section.adapter == "merged":
        return (model_id,)
    if model_id == BASE:
        raise UserError(f"The adapter has the name '{BASE}', under which its base model is served.", MERGED)
    return (model_id, BASE)


def read(export: Path) -> Adapter:
    """The adapter in an export and its base model. Refuses one that vLLM would not compute as peft does."""
    folder = export / FOLDER
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"serve.adapter=apart: {export} has no adapter ({FOLDER}/{CONFIG}).", MERGED)
    config = read_config(path, MERGED)
    rank = check_config(path, config, MERGED)
    return Adapter(folder, _base(path, config), next(bound for bound in RANKS if rank <= bound))


def check_config(path: Path, config: dict[str, Any], fix: str) -> int:
    """Refuses an adapter that vLLM would not compute as peft does. Returns its rank."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path} is of a {shown(config.get('peft_type'))} adapter, not of LORA.", fix)
    for key in UNSUPPORTED:
        if config.get(key):
            raise UserError(f"{path} has {key}={shown(repr(config[key]))}, which vLLM does not compute.", fix)
    if config.get("bias", "none") != "none":
        raise UserError(f"{path} has bias={shown(repr(config['bias']))}, which vLLM does not compute.", fix)
    rank = config.get("r")
    if not isinstance(rank, int) or not 0 < rank <= RANKS[-1]:
        raise UserError(f"{path} has r={shown(repr(rank))}, and vLLM's adapters have ranks from 1 to {RANKS[-1]}.", fix)
    return rank


def check(section: ServeSection, export: Path) -> Adapter:
    """Also checks the folders, for a start on this machine."""
    adapter = read(export)
    model_dir.check(adapter.base)
    model_dir.check_safetensors(adapter.folder / WEIGHTS)
    if section.device == "cpu":
        check_no_experts(adapter.base, MERGED)
    return adapter


def check_no_experts(base: Path, fix: str) -> None:
    config = json.loads((base / "config.json").read_text())
    if config.get("num_experts") or config.get("num_local_experts"):
        raise UserError("vLLM has no adapters for mixtures of experts on CPUs.", fix)


def read_config(path: Path, fix: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {shown(error, 120)}.", fix) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object.", fix)
    return config


def _base(path: Path, config: dict[str, Any]) -> Path:
    given = config.get("base_model_name_or_path")
    if not isinstance(given, str):
        raise UserError(f"{path} names no base model (base_model_name_or_path).", MERGED)
    try:
        return source.snapshot(given)
    except UserError as error:
        raise UserError(f"The base model of {path.parent} is not there: {error.cause}", f"Restore it. {MERGED}") from None
