"""Folders of tiny models as transformers saves them, with weights that make every part of a model count."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from tiny_models import ROWS, Tiny
from torch import Tensor

from strata.platform import recipe_file
from strata.platform.model_families.parameters import shapes
from strata.platform.recipe import ModelSection
from strata.training.checkpoint.pretrained import Pretrained
from strata.training.parallel.shard_map import Shard

rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def build(row: Tiny) -> Any:
    """A model of transformers with random weights; those that start at a constant are random too."""
    torch.manual_seed(1)
    kind = getattr(transformers, row.architecture)
    config = kind.config_class(**row.config, attn_implementation="eager", experts_implementation="eager")
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.25)
            if "norm" in name and not row.family.startswith("gemma"):
                weight.add_(1.0)
    return model


def save(row: Tiny, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    build(row).to(dtype).save_pretrained(folder, **options)
    return folder


def imported(folder: Path, **keys: Any) -> ModelSection:
    """Model section of a recipe that imports a folder, as the command line resolves it."""
    tree = yaml.safe_load(recipe_file.dump(recipe_file.load("laptop")))
    return recipe_file.check(tree | {"model": {"from": str(folder), **keys}}, "test").model


def read_all(folder: Path, section: ModelSection) -> dict[str, Tensor]:
    """All parameters, whole."""
    source = Pretrained(folder, section)
    whole = {name: Shard(name, shape, None, 0) for name, shape in shapes(section).items()}
    return {name: source.read_range(shard, "weight", 0, shard.numel).view(shard.shape) for name, shard in whole.items()}
