"""Greedy check against transformers, on steps that run without an export: of every family, and of wrong ones."""

from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_models import ROWS
from torch import Tensor

from strata.platform.errors import UserError
from strata.training.deployment import prompts, report
from strata.training.deployment.check import ROUNDINGS, Comparison, compare, tied
from strata.training.deployment.runners import Runner
from strata.training.deployment.step import cache_shape

from .conftest import CONTEXT, VOCAB, build, eager, padded

COMMON = ["llama-3", "mistral", "qwen3", "mixtral", "gemma3-untied"]
OTHERS = ["qwen2-sliding", "gemma2", "gpt_oss", "olmo2", "smollm3", "qwen2_moe", "qwen3_moe-sliding"]


def checked(model: Any, run: Runner, count: int = 3, tokens: int = 6) -> Comparison:
    ids = prompts.from_vocabulary(model.config, count, CONTEXT - tokens)
    return compare(model, run, cache_shape(model), ids, tokens, lambda: None)


@pytest.mark.parametrize("row", [*COMMON, *(pytest.param(row, marks=pytest.mark.rotation) for row in OTHERS)])
def test_the_step_of_every_family_generates_as_transformers(row: str) -> None:
    model = build(row)
    result = checked(model, eager(model))
    assert (result.prompts, result.tokens, result.equal) == (3, 18, 18) and not result.disagreements
    assert result.largest_difference < 1e-4 and result.seconds > 0 < result.reference_seconds


@pytest.mark.parametrize("row", ["mistral", "gemma3-untied", "mixtral"])
def test_a_padded_batch_has_the_logits_of_its_rows(row: str) -> None:
    model = build(row)
    padded(model, eager(model), cache_shape(model))


def test_every_family_has_a_row_in_these_tests() -> None:
    assert {ROWS[row].family for row in (*COMMON, *OTHERS)} == {row.family for row in ROWS.values()}


def test_the_cache_has_the_shape_of_the_model() -> None:
    shape = cache_shape(build("gemma3-untied"))
    assert shape.heads_and_widths == ((2, 12),) * 4
    assert shape.names("present") == ["present.0.key", "present.0.value", "present.1.key", "present.1.value"]
    assert [tuple(each.shape) for each in shape.past(3, 0)] == [(3, 2, 0, 12)] * 4


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.mark.parametrize("kind", ["no cache", "shifted positions", "other weights"])
def test_a_wrong_export_is_found(model: Any, kind: str) -> None:
    right, shape = eager(model), cache_shape(model)

    def forgetting(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return right(ids, mask, [torch.zeros_like(each) for each in past])

    def shifted(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        early = mask.clone()
        early[:, :1] = 0
        return right(ids, early if mask.shape[1] > 8 else mask, past)

    runs = {"no cache": forgetting, "shifted positions": shifted, "other weights": eager(build("llama", rms_norm_eps=0.5))}
    ids = prompts.from_vocabulary(model.config, 3, 20)
    result = compare(model, runs[kind], shape, ids, 6, lambda: None)
    assert result.differences and result.largest_difference > 1e-3
    with pytest.raises(UserError, match=r"onnxruntime differs from transformers at .* transformers chose"):
        report.require_equal("onnxruntime", result)


def test_a_tie_is_reported_as_one_and_the_rest_is_compared() -> None:
    """Two equal rows of the output layer have equal logits: transformers takes the first, this export the second."""
    twin = build("llama")
    ids = prompts.from_vocabulary(twin.config, 2, CONTEXT - 6)
    chosen = int(twin(torch.tensor([ids[1]])).logits[0, -1].argmax())
    first, second = sorted((chosen, (chosen + 1) % VOCAB))
    twin.lm_head.weight[[first, second]] = twin.lm_head.weight[chosen].clone()
    right = eager(twin)

    def second_of_two(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        logits, present = right(ids, mask, past)
        logits[..., first] -= 1e-5
        return logits, present

    result = checked(twin, second_of_two, count=2, tokens=6)
    assert result.ties and not result.differences and result.equal == result.tokens - len(result.ties)
    assert (result.ties[0].prompt, result.ties[0].position) <= (1, 0), "the token after the second prompt is one"
    assert all((tie.expected, tie.found, tie.gap) == (first, second, 0) for tie in result.ties)
    report.require_equal("onnxruntime", result)
    console = Console(record=True, width=100)
    report.show(console, "onnxruntime", result, 1_234_567)
    text = console.export_text()
    assert f"{result.equal} of {result.tokens}" in text and "1.23 MB" in text
    assert f"transformers chose {first}, the export {second} (equal logits, a tie)" in text


def test_a_tie_is_a_matter_of_rounding() -> None:
    eps = torch.finfo(torch.float32).eps
    assert tied(0.0, 10.0, eps) and tied(ROUNDINGS * eps * 10, 10.0, eps) and not tied(ROUNDINGS * eps * 10.1, 10.0, eps)
    assert not tied(float("nan"), 10.0, eps)
    assert tied(0.05, 10.0, torch.finfo(torch.float16).eps) and not tied(0.05, 10.0, eps)


def test_logits_that_are_not_numbers_are_a_difference(model: Any) -> None:
    right = eager(model)

    def broken(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        logits, present = right(ids, mask, past)
        return logits * float("nan"), present

    result = checked(model, broken)
    assert result.largest_difference == float("inf") and result.differences


def test_the_models_own_generation_settings_do_not_count(model: Any) -> None:
    own = model.generation_config
    try:
        model.generation_config = type(own)(eos_token_id=list(range(VOCAB)), repetition_penalty=9.0)
        assert checked(model, eager(model)).equal == 18
        assert model.generation_config.repetition_penalty == 9.0, "restored"
    finally:
        model.generation_config = own


def test_prompts_grow_beyond_the_window() -> None:
    ids = prompts.from_vocabulary(build("mistral", sliding_window=50).config, 20, 500)
    lengths = [len(each) for each in ids]
    assert lengths[0] == 1 and lengths[-1] == 58 and lengths == sorted(lengths) and len(set(lengths)) == 20
    assert max(map(max, ids)) < VOCAB and ids == prompts.from_vocabulary(build("mistral", sliding_window=50).config, 20, 500)
    assert max(map(len, prompts.from_vocabulary(build("mistral").config, 20, 5))) == 5
    assert len(prompts.from_vocabulary(build("mistral").config, 1, 5)) == 1
