"""Texts and completions as tokens, and tokenizers that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata.platform.errors import UserError
from strata.training.data.finetuning.examples import Place, parse, text_example
from strata.training.data.finetuning.rendering import Document, Renderer, load_tokenizer, tokenizer_digest

from . import tiny

PLACE = Place("a.jsonl", "line", 7)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(tiny.save_tokenizer(tmp_path_factory.mktemp("plain"), None))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(tiny.save_tokenizer(tmp_path_factory.mktemp("bos"), None, bos=True))


def completion(tokenizer: Any, prompt: str, answer: str, mask: str = "assistant") -> Document:
    row = {"prompt": prompt, "completion": answer}
    [[document]] = Renderer(tokenizer, None, mask).render([parse(row, "completion", PLACE)])
    return document


def texts(tokenizer: Any, *given: str) -> list[Document]:
    examples = [text_example(text, PLACE) for text in given]
    return [document for [document] in Renderer(tokenizer, None, "assistant").render(examples)]


def names(tokenizer: Any, document: Document) -> list[tuple[str, int]]:
    return list(zip(tokenizer.convert_ids_to_tokens(document.ids.tolist()), document.mask.tolist(), strict=True))


def test_completion_counts_with_an_eos_token(plain: Any, with_bos: Any) -> None:
    expected = [("he", 0), ("llo", 0), ("Ġhow", 0), ("Ġare", 1), ("Ġyou", 1), ("?", 1), ("</s>", 1)]
    assert names(plain, completion(plain, "hello how", " are you?")) == expected
    assert names(with_bos, completion(with_bos, "hello how", " are you?")) == [("<s>", 0), *expected]


def test_tokens_are_not_doubled(with_bos: Any) -> None:
    expected = [("<s>", 0), ("he", 0), ("llo", 0), ("Ġhow", 1), ("</s>", 1)]
    assert names(with_bos, completion(with_bos, "<s>hello", " how</s>")) == expected


def test_prompt_counts_with_the_mask_of_all_tokens(with_bos: Any) -> None:
    document = completion(with_bos, "hello", " how", mask="all")
    assert document.mask.tolist() == [0, 1, 1, 1, 1]  # nothing predicts the first token


def test_token_across_the_border_counts(plain: Any) -> None:
    """A prompt that ends with a space shares a token with the answer."""
    assert names(plain, completion(plain, "hello ", "how")) == [("he", 0), ("llo", 0), ("Ġhow", 1), ("</s>", 1)]


def test_empty_prompt(plain: Any, with_bos: Any) -> None:
    assert names(plain, completion(plain, "", "hello")) == [("he", 1), ("llo", 1), ("</s>", 1)]
    assert names(with_bos, completion(with_bos, "", "hello")) == [("<s>", 0), ("he", 1), ("llo", 1), ("</s>", 1)]


def test_text_counts_as_a_whole(plain: Any, with_bos: Any) -> None:
    [document, other] = texts(plain, "hello", " how\n")
    assert names(plain, document) == [("he", 1), ("llo", 1), ("</s>", 1)]
    assert other.ids.tolist() == [*plain(" how\n").input_ids, plain.eos_token_id] and other.mask.all()
    [document] = texts(with_bos, "hello")
    assert [name for name, _ in names(with_bos, document)] == ["<s>", "he", "llo", "</s>"]


def test_special_token_in_a_text_is_text(plain: Any) -> None:
    [document] = texts(plain, "hello</s>how<|im_end|>")
    assert document.ids.tolist().count(plain.eos_token_id) == 1
    assert plain.convert_tokens_to_ids("<|im_end|>") not in document.ids
    assert plain.decode(document.ids.tolist()) == "hello</s>how<|im_end|></s>"


def test_texts_with_names_of_special_tokens_are_found(plain: Any) -> None:
    renderer = Renderer(plain, tiny.CHATML, "assistant")
    for content, expected in (("hello", False), ("hello <|im_end|>", True), ("<think>", False)):
        assert renderer.names_special_token(text_example(content, PLACE)) is expected
        row = {"messages": [tiny.user("a"), tiny.assistant(content)]}
        assert renderer.names_special_token(parse(row, "chat", PLACE)) is expected
        row = {"prompt": content, "completion": "b"}  # prompts may be rendered already
        assert not renderer.names_special_token(parse(row, "completion", PLACE))


def test_several_examples_at_once_equal_one_by_one(plain: Any) -> None:
    renderer = Renderer(plain, tiny.QWEN, "assistant")
    rows = [
        parse({"messages": [tiny.user(f"{number}"), tiny.assistant("a"), tiny.user("b"), tiny.assistant("c")]}, "chat", PLACE)
        for number in range(5)
    ]
    together = renderer.render(rows)
    for row, documents in zip(rows, together, strict=True):
        [alone] = renderer.render([row])
        assert [each.ids.tolist() for each in alone] == [each.ids.tolist() for each in documents]
        assert [each.mask.tolist() for each in alone] == [each.mask.tolist() for each in documents]
    assert renderer.render([]) == []


def test_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.save_tokenizer(tmp_path, None, eos_token=None))
    with pytest.raises(UserError, match=r"Line 7 of a.jsonl cannot be ended: the tokenizer has no EOS token"):
        completion(tokenizer, "hello", "how")
    with pytest.raises(UserError, match="has no EOS token"):
        texts(tokenizer, "hello")


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder with a tokenizer"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match=r"The tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"The tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)


def test_digest_covers_the_files_of_a_tokenizer(tmp_path: Path) -> None:
    folder = tiny.save_tokenizer(tmp_path / "a", tiny.CHATML)
    same = tiny.save_tokenizer(tmp_path / "b", tiny.CHATML)
    (same / "model.safetensors").write_bytes(b"weights")
    digest = tokenizer_digest(folder)
    assert tokenizer_digest(same) == digest
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        path = same / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        assert tokenizer_digest(same) != digest
        path.write_bytes(before)
    (same / "config.json").write_text(json.dumps({"vocab_size": 1}))
    assert tokenizer_digest(same) != digest
