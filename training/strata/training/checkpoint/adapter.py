"""Adapters (LoRA and DoRA) in peft's format: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from strata.platform.errors import UserError, shown
from strata.platform.model_families import registry
from strata.platform.recipe import LoraSection, ModelSection
from strata.training.model import dora, lora
from strata.training.parallel.shard_map import Shard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Keys of peft's configuration that change what an adapter computes, with the values that Strata computes too.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}


def adapted(section: ModelSection, adapters: LoraSection) -> list[str]:
    """Parameters of the whole model that get an adapter. Refuses those that lie in a tensor with others, as the experts of
    gpt-oss do: peft has no adapter for a part of a tensor."""
    assert section.family
    found = []
    for name, location in registry.named(section.family).tensors(section).items():
        if not name.endswith(".weight") or name.split(".")[-2] not in adapters.targets:
            continue
        if location.index or location.transposed:
            kinds = ", ".join(kind for kind in adapters.targets if kind.endswith(("q_proj", "k_proj", "v_proj", "o_proj")))
            cause = f"{name} of the family {section.family} is a part of the tensor {location.tensor}: it cannot have an adapter."
            raise UserError(cause, f"Set train.lora.targets=[{kinds or 'q_proj, v_proj'}].")
        found.append(name)
    return found


def _peft_names(section: ModelSection, adapters: LoraSection) -> dict[str, str]:
    """peft's tensor name of each adapter parameter."""
    assert section.family
    locations = registry.named(section.family).tensors(section)
    names: dict[str, str] = {}
    for name in adapted(section, adapters):
        ours, theirs = name.removesuffix(".weight"), locations[name].tensor.removesuffix(".weight")
        parts = ["lora_A.weight", "lora_B.weight", *(["lora_magnitude_vector"] if adapters.dora else [])]
        names |= {f"{ours}.{part}": f"{PREFIX}{theirs}.{part}" for part in parts}
    return names


def write(folder: Path, weight: Callable[[str], Tensor], section: ModelSection, adapters: LoraSection) -> None:
    """Writes an adapter. `weight` returns a whole adapter parameter by name."""
    folder.mkdir(parents=True, exist_ok=True)
    names = _peft_names(section, adapters)
    save_file({theirs: weight(ours).contiguous() for ours, theirs in names.items()}, folder / WEIGHTS, {"format": "pt"})
    targets = sorted({theirs.rpartition(".lora_")[0].rpartition(".")[2] for theirs in names.values()})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": section.source,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": targets,
        "bias": "none",
        "use_dora": adapters.dora,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2))


class Adapter:
    """Source of the adapter parameters of a folder in peft's format, with moments of zero."""

    def __init__(self, folder: Path, section: ModelSection, adapters: LoraSection) -> None:
        require_same(folder, adapters)
        self._names = _peft_names(section, adapters)
        path = folder / WEIGHTS
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {shown(error, 120)}.", "Restore the adapter, or start without it.") from None
        self._require_names(path, set(self._file.keys()))  # type: ignore[no-untyped-call]

    def read_range(self, shard: Shard, kind: str, first: int, last: int) -> Tensor:
        if kind != "weight":
            return torch.zeros(last - first)
        whole: Tensor = self._file.get_tensor(self._names[shard.name]).float()
        assert tuple(whole.shape) == shard.shape, f"{shard.name} is {tuple(whole.shape)} in the adapter and {shard.shape} here"
        return shard.of(whole).reshape(-1)[first:last]

    def _require_names(self, path: Path, there: set[str]) -> None:
        expected = set(self._names.values())
        if missing := sorted(expected - there):
            raise UserError(f"{path} lacks {missing[0]}.", "Set train.lora.targets to the adapter's target_modules.")
        if surplus := sorted(there - expected):
            cause = f"{path} has {surplus[0]}, which has no place in this model and these targets."
            raise UserError(cause, "Set train.lora.targets to the adapter's target_modules.")


def require_same(folder: Path, adapters: LoraSection) -> None:
    """Compares peft's configuration with the recipe's."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"train.lora.from: {path} cannot be read: {shown(error, 120)}.", "Give an adapter's folder.") from None
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path} is of a {config.get('peft_type')} adapter, not of LORA.", "Give a LoRA adapter.")
    for key, values in NEUTRAL.items():
        if key in config and config[key] not in values:
            fix = "Merge that adapter into its base with peft (merge_and_unload), and fine-tune the result."
            raise UserError(f"{path} has {key}={shown(repr(config[key]))}, which Strata does not compute.", fix)
    if bool(config.get("use_dora")) != adapters.dora:
        theirs, ours = str(not adapters.dora).lower(), str(adapters.dora).lower()
        cause = f"{path} has use_dora={theirs}, and train.lora.dora is {ours}."
        raise UserError(cause, f"Set train.lora.dora={theirs}.")
    for key, name in (("r", "rank"), ("lora_alpha", "alpha")):
        if config.get(key) != getattr(adapters, name):
            cause = f"{path} has {key}={config.get(key)}, and train.lora.{name} is {getattr(adapters, name):g}."
            raise UserError(cause, f"Set train.lora.{name}={config.get(key)}.")


def merging(whole: Callable[[str], Tensor], names: Iterable[str], adapters: LoraSection) -> Callable[[str], Tensor]:
    """Whole parameters by name, with the adapters merged into the projections `names`."""
    with_adapter = set(names)

    def merged(name: str) -> Tensor:
        if name not in with_adapter:
            return whole(name)
        path = name.removesuffix(".weight")
        weight = lora.merged(whole(name), whole(f"{path}.lora_A.weight"), whole(f"{path}.lora_B.weight"), adapters)
        return dora.merged(weight, whole(f"{path}.lora_magnitude_vector")) if adapters.dora else weight

    return merged
