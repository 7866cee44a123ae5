"""Settings of speculative decoding, pool by pool, and the blocks that a prefill engine hands over."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from strata.platform.recipe import ServeSection
from strata.serving.engine.disaggregation import _of_prompt
from strata.serving.spec import EngineSpec, Network, Role

NETWORK = Network("127.0.0.1", b"s" * 32)
DRAFT = {"method": "draft", "draft": "/models/small", "tokens": 3}


def config(role: Role, **serve: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (
        EngineSpec.of(role, ServeSection(**serve), Path("/models/m"), "m", NETWORK).engine_kwargs().get("speculative_config")
    )
    return found


def test_only_decode_engines_look_up_ngrams() -> None:
    ngram = {"method": "ngram", "tokens": 2}
    found = config("decode", speculative=ngram, max_sequences=8)
    assert found is not None and found["method"] == "ngram" and found["num_speculative_tokens"] == 2
    assert found["num_speculative_tokens_per_batch_size"] == [[1, 8, 2]]
    assert config("prefill", speculative=ngram) is None
    assert config("decode") is None


def test_prefill_engines_load_the_draft_and_do_not_draft() -> None:
    decode, prefill = config("decode", speculative=DRAFT), config("prefill", speculative=DRAFT)
    assert decode is not None and prefill is not None
    assert decode["model"] == prefill["model"] == "/models/small" and decode["method"] == prefill["method"] == "draft_model"
    assert decode["num_speculative_tokens_per_batch_size"] == [[1, 64, 3]]
    assert prefill["num_speculative_tokens_per_batch_size"] == [[1, 64, 0]]


def test_gpu_steps_hold_every_draft() -> None:
    serve = ServeSection(device="gpu", max_sequences=1000, speculative=DRAFT)
    kwargs = EngineSpec.of("decode", serve, Path("/models/m"), "m", NETWORK).engine_kwargs()
    assert kwargs["max_num_batched_tokens"] == 5000
    ServeSection(max_sequences=8, speculative=DRAFT, decode={"step_tokens": 40})
    with pytest.raises(ValidationError, match="must be at least 40"):
        ServeSection(max_sequences=8, speculative=DRAFT, decode={"step_tokens": 39})
    ServeSection(max_sequences=8, speculative=DRAFT, prefill={"step_tokens": 8})


@pytest.mark.parametrize(
    ("speculative", "reason"),
    [
        ({"method": "suffix"}, "arctic-inference"),
        ({"method": "eagle3"}, "hidden states"),
        ({"method": "draft"}, "needs draft"),
        ({"method": "ngram", "draft": "small"}, "is for method=draft"),
        ({"method": "ngram", "tokens": 0}, "greater than 0"),
        ({"method": "ngram", "tokens": 17}, "less than or equal to 16"),
        ({}, "Field required"),
    ],
)
def test_refused_sections(speculative: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ServeSection(speculative=speculative)


@pytest.mark.parametrize(
    "changes",
    [{"adapters": {}}, {"adapter": "apart"}, {"engine": {"speculative_config": {}}}, {"kernels": "strata", "device": "gpu"}],
)
def test_sections_that_exclude_speculation(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="speculative"):
        ServeSection(speculative={"method": "ngram"}, **changes)


def test_further_model_may_have_no_draft() -> None:
    models = {"other": {"model": "/models/other", "speculative": None}}
    serve = ServeSection(speculative=DRAFT, models=models)
    assert serve.further(serve.models["other"].changes).speculative is None


@pytest.mark.parametrize(("tokens", "blocks"), [(1, [7]), (15, [7]), (16, [7]), (17, [7, 8]), (32, [7, 8]), (33, [7, 8, 9])])
def test_blocks_behind_the_prompt_are_not_handed_over(tokens: int, blocks: list[int]) -> None:
    given = {"remote_block_ids": ([7, 8, 9],), "remote_port": 1}
    assert _of_prompt(given, tokens, 16) == {"remote_block_ids": [blocks], "remote_port": 1}


@pytest.mark.parametrize(
    ("speculative", "module"), [(None, "nixl_layout"), ({"method": "ngram"}, "nixl_layout"), (DRAFT, "side_channel")]
)
def test_blocks_of_two_models_have_the_layout_of_vllm(speculative: dict[str, Any] | None, module: str) -> None:
    for role in ("prefill", "decode"):
        serve = ServeSection(device="gpu", speculative=speculative)
        transfer = EngineSpec.of(role, serve, Path("/models/m"), "m", NETWORK).engine_kwargs()["kv_transfer_config"]  # type: ignore[arg-type]
        assert transfer["kv_connector_module_path"].endswith(module)
