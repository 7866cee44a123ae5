"""Folder of a small teacher, as `strata train` exports one."""

from pathlib import Path

import torch

from strata.platform.recipe import ModelSection
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer
from strata.training.model.llama import Llama

SECTION = ModelSection(layers=3, hidden=48, heads=4, kv_heads=2, ffn=80, vocab=512, context=32)
SHARPER = 12.0  # random embeddings make nearly uniform distributions, from which nothing could be learned


def write_teacher(folder: Path, tokens: Path, section: ModelSection = SECTION) -> Path:
    """Random weights with the tokenizer of a prepared corpus."""
    folder.mkdir(parents=True)
    weights = {name: weight.detach().clone() for name, weight in Llama(section, 5, "torch").named_parameters()}
    weights["model.embed_tokens.weight"] *= SHARPER
    write_folder(folder, weights, section, torch.float32)
    tokenizer.save(tokenizer.load(tokens), folder, section.context)
    return folder
