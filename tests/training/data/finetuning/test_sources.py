"""Inputs of a set: files, folders, globs, URIs, saved datasets and datasets of the hub."""

from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection, DataSetSection
from strata.training.data import corpus
from strata.training.data.finetuning import sources
from strata.training.data.finetuning.examples import Chat, Example, Text
from strata.training.data.finetuning.sources import InputSet, open_sets, read_examples
from strata.training.data.left_out import LeftOut

from .tiny import assistant, chats, user, write_jsonl


def opened(**section: Any) -> InputSet:
    [one] = open_sets(DataSection(sets=(DataSetSection(**section),)))
    return one


def examples(one: InputSet, left_out: LeftOut | None = None) -> list[Example]:
    return [example for source in one.inputs for example in read_examples(source, left_out or LeftOut())]


def answers(one: InputSet) -> list[str]:
    found = []
    for example in examples(one):
        [chat] = example.sequences
        assert isinstance(chat, Chat)
        found.append(chat.messages[-1]["content"])
    return found


def texts(one: InputSet) -> list[str]:
    return [each.text for example in examples(one) for each in example.sequences if isinstance(each, Text)]


def expected(count: int, first: int = 0) -> list[str]:
    return [row["messages"][-1]["content"] for row in chats(count, first)]


def test_file_and_its_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chats(3))
    path.write_text("\n" + path.read_text())
    one = opened(path=path, kind="chat")
    assert one.title == "a.jsonl" and answers(one) == expected(3)
    assert [str(example.place) for example in examples(one)] == [f"line {number} of {path}" for number in (2, 3, 4)]


def test_folder_and_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("b/y.jsonl", "b/x.jsonl", "a.jsonl", "b/.hidden.jsonl")):
        write_jsonl(tmp_path / name, chats(2, 10 * number))
    (tmp_path / "b/readme.md").write_text("not examples")
    one = opened(path=tmp_path, kind="chat")
    assert [Path(source.name).name for source in one.inputs] == ["a.jsonl", "readme.md", "x.jsonl", "y.jsonl"]
    left_out = LeftOut()
    assert len(examples(one, left_out)) == 6
    assert {path.name: reason for path, reason in left_out.files.items()} == {"readme.md": "not JSONL or Parquet"}
    for pattern in (str(tmp_path / "b/*.jsonl"), str(tmp_path / "**/[xy].jsonl")):
        assert answers(opened(path=pattern, kind="chat")) == expected(2, 10) + expected(2)
    monkeypatch.chdir(tmp_path)
    one = opened(path="b/?.jsonl", kind="chat")
    assert answers(one) == expected(2, 10) + expected(2) and all(Path(source.name).is_absolute() for source in one.inputs)


def test_name_with_magic_characters_is_a_name_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a[1].jsonl", chats(2))
    write_jsonl(tmp_path / "a1.jsonl", chats(2, 5))
    assert answers(opened(path=path, kind="chat")) == expected(2)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sets\.0\.path=.*/nowhere does not exist"):
        opened(path=tmp_path / "nowhere", kind="chat")
    with pytest.raises(UserError, match=r"data\.sets\.0\.path=.* matches no file"):
        opened(path=tmp_path / "*.jsonl", kind="chat")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.sets\.0\.path=.*/empty has no files"):
        opened(path=tmp_path / "empty", kind="chat")
    with pytest.raises(UserError, match=r"data\.path=.*/nowhere does not exist"):
        open_sets(DataSection(path=tmp_path / "nowhere", kind="chat"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "Line 2 of .*a.jsonl is not JSON"),
        ("[]", "Line 2 of .*a.jsonl is not an object but a list"),
        ('{"messages": [], "messages": []}', "Line 2 of .*a.jsonl has 'messages' more than once"),
        ('{"messages": [{"role": "user", "role": "x"}]}', "Line 2 of .*a.jsonl has 'role' more than once"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "Line 2 of .*a.jsonl has an unpaired surrogate"),
        ('{"text": "x"}', "Line 2 of .*a.jsonl has no 'messages'"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chats(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=problem):
        examples(opened(path=path, kind="chat"))


def test_paired_surrogates_are_characters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "\\ud83d\\ude42"}, {"role": "assistant", "content": "b"}]}'
    )
    [example] = examples(opened(path=tmp_path / "a.jsonl", kind="chat"))
    assert isinstance(example.sequences[0], Chat) and example.sequences[0].messages[0]["content"] == "🙂"


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"messages": "\xff"}')
    with pytest.raises(UserError, match="is not UTF-8: byte 14"):
        examples(opened(path=tmp_path / "a.jsonl", kind="chat"))
    (tmp_path / "b.txt").write_text("hello")
    with pytest.raises(UserError, match=r"b.txt is not JSONL or Parquet: text"):
        examples(opened(path=tmp_path / "b.txt", kind="chat"))


def test_parquet_of_conversations(tmp_path: Path) -> None:
    """Arrow gives every message all keys that any message has; those without a value are left out."""
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    rows = [[user("a"), {**assistant(""), "tool_calls": calls}], [user("b"), assistant("c")]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "a.parquet")
    one = opened(path=tmp_path / "a.parquet", kind="chat")
    [first, second] = [example.sequences[0] for example in examples(one)]
    assert isinstance(first, Chat) and isinstance(second, Chat)
    assert first.messages[1]["tool_calls"][0]["function"]["name"] == "f"
    assert second.messages == (user("b"), assistant("c"))
    assert [str(example.place) for example in examples(one)] == [f"row {number} of {tmp_path / 'a.parquet'}" for number in (1, 2)]
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["messages", "messages"])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(UserError, match="has 2 columns named 'messages'"):
        examples(opened(path=tmp_path / "b.parquet", kind="chat"))


def test_texts_and_blank_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"body": "one"}, {"body": " "}, {"body": "two"}])
    (tmp_path / "b.txt").write_text("three")
    one = opened(path=tmp_path, text_field="body")
    left_out = LeftOut()
    assert [str(example.place).split(" of ")[0] for example in examples(one, left_out)] == ["line 1", "line 3", "part 1"]
    assert texts(one) == ["one", "two", "three"] and left_out.empty == 1


@pytest.mark.parametrize("split", [None, "train", "test"])
def test_saved_dataset(tmp_path: Path, split: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DATASET_ROWS", 2)
    rows = datasets.Dataset.from_list(chats(5))
    if split is None:
        rows.save_to_disk(str(tmp_path / "saved"))
    else:
        other = datasets.Dataset.from_list(chats(1, 50))
        datasets.DatasetDict({split: rows, "other": other}).save_to_disk(str(tmp_path / "saved"))
    one = opened(path=tmp_path / "saved", kind="chat", hf_split=split or "train")
    assert answers(one) == expected(5) and [len(source.rows) for source in one.inputs] == [2, 2, 1]
    assert [example.place.number for example in examples(one)] == [1, 2, 3, 4, 5]
    assert len({source.digest for source in one.inputs}) == 3


def test_saved_dataset_without_the_split_or_damaged(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(chats(1))}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="has no split 'test'") as raised:
        opened(path=tmp_path / "saved", kind="chat", hf_split="test")
    assert raised.value.fix == "Set data.sets.0.hf_split to one of: train."
    (tmp_path / "saved/dataset_dict.json").write_text("{")
    with pytest.raises(UserError, match="is a saved dataset that cannot be loaded"):
        opened(path=tmp_path / "saved", kind="chat")


def test_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return datasets.Dataset.from_list([{"text": "one"}, {"text": None}, {"text": "two"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    one = opened(hf="a/b", hf_config="c", hf_split="d")
    assert one.title == "a/b" and texts(one) == ["one", "two"]
    assert calls == [(("a/b", "c"), {"split": "d"})]
    with pytest.raises(UserError, match="a/b has no field 'body'"):
        opened(hf="a/b", text_field="body")
    with pytest.raises(UserError, match="Row 1 of a/b has no 'messages'"):
        examples(opened(hf="a/b", kind="chat"))


def test_hub_dataset_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"data\.sets\.0\.hf=a/b cannot be loaded: no network"):
        opened(hf="a/b")


def test_uri_is_downloaded_once_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    for name in ("one.jsonl", "two.jsonl"):
        files.pipe(
            f"/bucket/in/{name}", b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        )
    files.pipe("/bucket/in/.hidden", b"x")
    one = opened(uri="memory://bucket/in", kind="chat")
    assert answers(one) == ["b", "b"] and [Path(source.name).name for source in one.inputs] == ["one.jsonl", "two.jsonl"]
    assert len(opened(uri="memory://bucket/in/o*.jsonl", kind="chat").inputs) == 1

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("downloaded again")

    with monkeypatch.context() as patch:
        patch.setattr(type(files), "get_file", fail)
        assert [source.name for source in opened(uri="memory://bucket/in/", kind="chat").inputs] == [
            each.name for each in one.inputs
        ]
    files.pipe(
        "/bucket/in/one.jsonl", b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}\n'
    )
    assert answers(opened(uri="memory://bucket/in/one.jsonl", kind="chat")) == ["c"]


def test_failed_download_leaves_nothing(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/bucket/broken/a.jsonl", b"x")

    def fail(_: Any, name: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("connection lost")

    monkeypatch.setattr(type(files), "get_file", fail)
    with pytest.raises(UserError, match=r"data\.sets\.0\.uri=memory://bucket/broken cannot be read: connection lost"):
        opened(uri="memory://bucket/broken", kind="chat")
    assert [path for path in (own_home / ".strata/downloads").rglob("*") if path.is_file()] == []


def test_uri_of_a_local_file_is_not_copied(tmp_path: Path, own_home: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chats(2))
    assert opened(uri=f"file://{path}", kind="chat").inputs[0].name == str(path)
    assert not (own_home / ".strata/downloads").exists()
    with pytest.raises(UserError, match="does not exist"):
        opened(uri=f"file://{tmp_path}/b.jsonl", kind="chat")
    with pytest.raises(UserError, match=r"data\.sets\.0\.uri=nosuch://x cannot be read"):
        opened(uri="nosuch://x", kind="chat")


def test_standard_library_without_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os")
    monkeypatch.setattr(sources, "stdlib_files", lambda: [tmp_path / "a.py"])
    [one] = open_sets(DataSection())
    assert one.title == "the Python standard library" and texts(one) == ["import os"]


def test_changed_file_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chats(3))
    one = opened(path=path, kind="chat")
    reading = read_examples(one.inputs[0], LeftOut())
    next(reading)
    write_jsonl(path, chats(2))
    with pytest.raises(UserError, match=r"a.jsonl changed while it was being read"):
        list(reading)


def test_training_from_scratch_refuses_examples(tmp_path: Path) -> None:
    for data in (DataSection(path=tmp_path, kind="chat"), DataSection(sets=(DataSetSection(path=tmp_path),))):
        with pytest.raises(UserError, match="is for training a given model further"):
            corpus.open_corpus(data)
