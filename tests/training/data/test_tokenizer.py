import json
from pathlib import Path

import pytest

from strata.training.data import tokenizer as bpe

TEXT = "def f(x):\n    return x + 1  # naïve, ✓ 日本\n"


def test_round_trip_is_lossless(tmp_path: Path) -> None:
    trained = bpe.train(["def g(y):\n    return y\n"] * 20, 400)
    bpe.save(trained, tmp_path, context=64)
    loaded = bpe.load(tmp_path)
    ids = loaded.encode(TEXT).ids
    assert loaded.decode(ids) == TEXT
    assert bpe.END_OF_TEXT_ID not in ids


def test_transformers_loads_the_tokenizer_and_its_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    bpe.save(bpe.train([TEXT] * 20, 400), tmp_path, context=64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXT)["input_ids"] == bpe.load(tmp_path).encode(TEXT).ids
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == bpe.END_OF_TEXT_ID
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "user: hi\nassistant:"


@pytest.mark.parametrize("vocab", [300, 400])
def test_vocabulary_has_the_special_token_all_bytes_and_merges(vocab: int) -> None:
    trained = bpe.train(["def g(y):\n    return y * " + " ".join(f"word{n} x{n * n}" for n in range(200))], vocab)
    assert trained.get_vocab_size() == vocab
    assert trained.token_to_id("<|endoftext|>") == 0
    assert len(trained.encode("\u00ff\x00\x7f", add_special_tokens=False).ids) == 4  # two bytes, and one byte each


def test_text_gets_no_leading_space() -> None:
    trained = bpe.train(["a b a b"] * 20, 300)
    assert trained.decode(trained.encode("a").ids) == "a"
    assert trained.encode("a").ids != trained.encode(" a").ids


def test_files_of_transformers(tmp_path: Path) -> None:
    trained = bpe.train([TEXT] * 20, 400)
    for _ in range(2):  # into a new folder, and into an existing one
        bpe.save(trained, tmp_path / "deep" / "export", context=77)
    config = json.loads((tmp_path / "deep" / "export" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 77 and config["clean_up_tokenization_spaces"] is False
    special = json.loads((tmp_path / "deep" / "export" / "special_tokens_map.json").read_text())
    assert special == dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    assert special.items() <= config.items()
