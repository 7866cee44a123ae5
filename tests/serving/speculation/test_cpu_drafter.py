"""Strata's drafter on CPUs against `transformers`: the tokens of its decoder, and rows that vLLM fills as it likes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Olmo2Config, PreTrainedConfig, Qwen2Config, Qwen3Config

from strata.platform.recipe import ServeSection
from strata.serving.speculation import dense, draft, settings
from strata.serving.speculation.cpu_drafter import CpuDrafter, Tokens
from strata.serving.speculation.draft_decoder import DraftDecoder
from strata.serving.speculation.settings import DRAFT_DIR

COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 64}
GROUPED = COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "tied": LlamaConfig(**GROUPED, tie_word_embeddings=True, attention_bias=True, head_dim=16),
    "scaled": LlamaConfig(**GROUPED, rope_parameters=SCALED | {"rope_theta": 1e4, "original_max_position_embeddings": 16}),
    "one-kv-head": LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=1),
    "mistral": MistralConfig(**GROUPED, sliding_window=48),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
}
COUNT = 4


def write(folder: Path, config: PreTrainedConfig) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # no two logits are within rounding
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


def continued(model: Any, tokens: list[int], count: int = COUNT) -> list[int]:
    ids = torch.tensor([tokens])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    found: list[int] = model.generate(ids, **options, pad_token_id=0)[0, len(tokens) :].tolist()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = write(tmp_path, CONFIGS[name])
    section = dense.section_of(tmp_path)
    assert section is not None and dense.capacity(section, 3) == (48 if name == "mistral" else 64)
    decoder = DraftDecoder(tmp_path, section, 3, 64)
    sequences = np.random.default_rng(1).integers(0, 512, (2, 20))
    counts = np.array([20, 13])  # the second row is shorter
    found = [decoder.next_tokens(slice(1, 3), sequences, np.zeros(2, np.int64), counts)]
    for step in range(COUNT - 1):
        found.append(decoder.next_tokens(slice(1, 3), found[-1][:, None], counts + step, np.ones(2, np.int64)))
    for row in range(2):
        assert [int(each[row]) for each in found] == continued(model, sequences[row, : counts[row]].tolist())


def drafter(folder: Path, rows: int = 3, longest: int = 200) -> CpuDrafter:
    config: Any = SimpleNamespace(
        additional_config={DRAFT_DIR: str(folder)},
        speculative_config=SimpleNamespace(num_speculative_tokens=COUNT),
        model_config=SimpleNamespace(max_model_len=longest),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
    )
    made = CpuDrafter(config)
    made.load_model(torch.nn.Module())
    return made


def propose(made: CpuDrafter, *sequences: list[int] | None) -> list[list[int]]:
    """Drafts for the sequences; None is a row that has sampled nothing."""
    table: Tokens = np.full((len(sequences), 200), 3, np.int32)
    lengths = np.zeros(len(sequences), np.int32)
    for row, sequence in enumerate(sequences):
        lengths[row] = len(sequence or ())
        table[row, : lengths[row]] = sequence or ()
    return made.propose([sequence[-1:] if sequence else [] for sequence in sequences], lengths, table, slot_mappings=None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("small")
    return folder, write(folder, LlamaConfig(**GROUPED))


def prompt(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return found


def test_accepted_and_rejected_drafts(small: tuple[Path, Any]) -> None:
    folder, model = small
    made, sequence = drafter(folder), prompt(9)
    for accepted in (0, 1, COUNT - 1, COUNT, 2):
        drafts = propose(made, sequence)[0]
        assert drafts == continued(model, sequence)
        sequence = [*sequence, *drafts[:accepted], 5]  # 5 is the target's own token


def test_rows_that_join_move_and_leave(small: tuple[Path, Any]) -> None:
    folder, model = small
    made, one, two, three = drafter(folder), prompt(30, 1), prompt(25, 2), prompt(3, 3)
    for rows in ((one,), (one, two), (two, one), (None, one), (three, one, two), (two, None, three), (three,)):
        drafts = propose(made, *rows)
        assert drafts == [continued(model, row) if row else [] for row in rows]
        one, two, three = [*one, 1], [*two, 2], [*three, 3]


def test_moved_rows_are_not_computed_again(small: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = small
    made, one, two = drafter(folder), prompt(40, 1), prompt(40, 2)
    propose(made, one, two)
    widths: list[int] = []
    plain = DraftDecoder.next_tokens
    monkeypatch.setattr(
        DraftDecoder,
        "next_tokens",
        lambda self, rows, tokens, *rest: widths.append(tokens.shape[1]) or plain(self, rows, tokens, *rest),
    )
    propose(made, [*two, 1], [*one, 1])
    assert widths == [1] * COUNT or widths == [2] + [1] * (COUNT - 1)


def test_sequences_beyond_the_context_of_the_draft(small: tuple[Path, Any]) -> None:
    folder, model = small
    made, sequence = drafter(folder), prompt(55)
    for _ in range(30):
        drafts = propose(made, sequence)[0]
        assert len(drafts) == COUNT
        sequence = [*sequence, 5]
    assert propose(drafter(folder), prompt(150))[0] == continued(model, prompt(150)[-32:])
    assert propose(made, prompt(200 - COUNT)) == [[]]  # the target's own context ends


def test_other_rows_do_not_change_drafts_near_the_end_of_a_context(small: tuple[Path, Any]) -> None:
    folder, model = small
    made, long, short = drafter(folder), prompt(60, 1), prompt(20, 2)
    assert propose(made, long, short) == [continued(model, long), continued(model, short)]
    assert propose(made, None, [*short, 1]) == [[], continued(model, [*short, 1])]
    assert propose(made, long, prompt(16, 4)) == [continued(model, long), continued(model, prompt(16, 4))]


def test_nothing_is_drafted_if_none_is_wanted(small: tuple[Path, Any]) -> None:
    made = drafter(small[0])
    made.wanted = 0
    assert propose(made, prompt(9)) == [[]]


def test_memory_of_caches_is_bounded(small: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    section = dense.section_of(small[0])
    assert section is not None
    of_token = 2 * 4 * 2 * 2 * 8  # keys and values in 4 bytes, 2 layers of 2 heads of 8
    monkeypatch.setattr(dense, "CACHE_BYTES", of_token * 3 * 40)
    assert dense.capacity(section, 3) == 40
    made, sequence = drafter(small[0]), prompt(60)
    assert propose(made, sequence)[0] == continued(small[1], sequence[-20:])
    monkeypatch.setattr(dense, "CACHE_BYTES", 1)
    assert propose(drafter(small[0]), sequence) == [[]]


def test_large_drafts_are_computed_by_vllm(small: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "WEIGHTS_BYTES", 1000)
    assert dense.section_of(small[0]) is None


def test_models_that_only_vllm_computes(tmp_path: Path) -> None:
    write(tmp_path / "other", Olmo2Config(**GROUPED))
    write(tmp_path / "dense", CONFIGS["qwen3"])
    assert dense.section_of(tmp_path / "other") is None
    assert not draft.on_cpu(ServeSection(device="gpu"), tmp_path / "dense")
    for name, method in (("other", "draft"), ("dense", "cpu-draft")):
        serve = ServeSection(speculative={"method": "draft", "draft": str(tmp_path / name)})
        found = settings.of(serve, "decode")
        assert found is not None and found.method == method
        assert (settings.of(serve, "prefill") is None) == (method == "cpu-draft")
