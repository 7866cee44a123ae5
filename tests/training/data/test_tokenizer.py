from pathlib import Path

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
