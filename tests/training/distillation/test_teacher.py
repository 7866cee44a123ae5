"""The teacher computes what transformers computes, for whole rows, slices of them and packed documents."""

from pathlib import Path

import pytest
import torch
from tiny_models import ROWS
from torch import Tensor

from strata.platform import recipe_file
from strata.platform.model_families import imported
from strata.platform.recipe import TrainSection
from strata.training.distillation.losses import Output
from strata.training.distillation.teacher import Teacher

from ..model.families.folders import save

CONTEXT = 24


def section_of_training(*more: str) -> TrainSection:
    return recipe_file.load("laptop", ["train.matmul=highest", *more]).train


def logits(output: Output) -> Tensor:
    return output.logits(torch.arange(len(output.x_nd)))


@pytest.mark.parametrize("name", ["llama-3", "gemma2", "qwen3_moe", "mixtral"])
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save(ROWS[name], tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    tokens_bt = torch.randint(96, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens_bt, use_cache=False).logits
    teacher = Teacher(imported.teacher(str(folder), CONTEXT), section_of_training(), "cpu")
    torch.testing.assert_close(logits(teacher.output(tokens_bt, None, slice(None))), expected.flatten(0, 1), rtol=1e-4, atol=1e-4)
    part = teacher.output(tokens_bt, None, slice(12, 24))
    torch.testing.assert_close(logits(part), expected[:, 12:].flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    folder = save(ROWS["llama"], tmp_path / "model")
    teacher = Teacher(imported.teacher(str(folder), CONTEXT), section_of_training(), "cpu")
    tokens_bt = torch.randint(96, (1, CONTEXT), generator=torch.Generator().manual_seed(2))
    positions_bt = torch.cat([torch.arange(10), torch.arange(14)])[None]
    packed = logits(teacher.output(tokens_bt, positions_bt, slice(None)))
    alone = [logits(teacher.output(part, None, slice(None))) for part in (tokens_bt[:, :10], tokens_bt[:, 10:])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_teacher_has_the_precision_of_the_training(tmp_path: Path) -> None:
    folder = save(ROWS["llama"], tmp_path / "model")
    teacher = Teacher(imported.teacher(str(folder), CONTEXT), section_of_training("train.precision=bf16"), "cpu")
    output = teacher.output(torch.zeros((1, 4), dtype=torch.long), None, slice(None))
    assert output.x_nd.dtype == output.weight_vd.dtype == torch.bfloat16 and not output.weight_vd.requires_grad
    assert logits(output).dtype == torch.float32
