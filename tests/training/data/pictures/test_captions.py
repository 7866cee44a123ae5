"""The captions' tokenizer, and that transformers reads it alike."""

from pathlib import Path

import numpy as np

from strata.training.data.pictures import captions

TEXTS = ["a red circle", "a blue circle, large", "a red square"]


def test_words_are_numbered_by_frequency_and_rare_ones_are_unknown() -> None:
    words = captions.build(TEXTS, vocab=7)
    assert words.get_vocab() == {token: id for id, token in enumerate((*captions.SPECIAL, "a", "circle", "red"))}
    assert words.encode("A red square").ids == [1, 4, 6, 2, 3]


def test_captions_are_framed_padded_and_cut(tmp_path: Path) -> None:
    captions.build(TEXTS, 512).save(str(tmp_path / captions.TOKENIZER))
    words = captions.load(tmp_path, 5)
    found = captions.encode(words, ["", "red", "a red circle large blue square"])
    assert found.shape == (3, 5) and found.dtype == np.int64
    assert found[0].tolist() == [1, 3, 0, 0, 0]
    assert found[1, 2:].tolist() == [3, 0, 0]
    assert found[2, [0, -1]].tolist() == [1, 3], "a caption that is cut has its end"


def test_transformers_reads_the_same_tokens(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    words = captions.build(TEXTS, 512)
    captions.save(words, tmp_path, 8)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = ["", "A red circle!", "a large green square of a blue red circle"]
    found = theirs(texts, padding="max_length", max_length=theirs.model_max_length, truncation=True).input_ids
    assert found == captions.encode(captions.load(tmp_path, 8), texts).tolist()
