"""Prepared rows as a whole: caching, splitting, refusals, several sets, and continuation after a kill."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection, DataSetSection
from strata.training.data.finetuning import parallel, prepare, rendered, store
from strata.training.data.finetuning.rendering import load_tokenizer
from strata.training.data.finetuning.rows import Rows
from strata.training.data.shards import SPLITS

from . import tiny
from .tiny import assistant, chats, user, write_jsonl

CONTEXT = 128


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizer"), tiny.CHATML)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for number in range(4):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", chats(10, 10 * number))
    return tmp_path / "in"


def no_message(message: object) -> None:
    raise AssertionError(message)


def run(tokenizer: Path, path: Path, context: int = CONTEXT, **more: Any) -> Path:
    return prepare.prepare(DataSection(path=path, **{"kind": "chat", **more}), tokenizer, context, no_message)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(folder: Path, tokenizer: Path, split: Any) -> list[str]:
    """Text of every document of a split, row by row."""
    loaded, rows = load_tokenizer(tokenizer), Rows(folder, split)
    found = []
    for index in range(len(rows)):
        tokens, at = rows.read(np.array([index])).tokens[0].tolist(), 0
        for length in rows.lengths(index):
            found.append(loaded.decode(tokens[at : at + length]))
            at += length
    return found


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the inputs that are rendered."""
    names: list[str] = []
    build = rendered._build

    def spy(job: rendered.Job, folder: Path) -> None:
        names.append(Path(job.source.name).name)
        build(job, folder)

    monkeypatch.setattr(rendered, "_build", spy)
    return names


@pytest.mark.parametrize("pack", [True, False])
def test_every_example_is_in_one_split(tokenizer: Path, files: Path, pack: bool) -> None:
    folder = run(tokenizer, files, pack=pack, holdout=0.2)
    found = {split: documents(folder, tokenizer, split) for split in SPLITS}
    expected = [
        f"<|im_start|>user\n{row['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n{row['messages'][1]['content']}<|im_end|>"
        for row in chats(40)
    ]
    assert sorted(found["train"] + found["validation"]) == sorted(expected)
    assert 1 < len(found["validation"]) < 20
    meta = store.read_meta(folder)
    [one] = meta.sets
    assert one.examples == {split: len(found[split]) for split in SPLITS} and meta.objective == "tokens"
    for split in SPLITS:
        rows = Rows(folder, split)
        everything = rows.read(np.arange(len(rows)))
        assert rows.loss_tokens(np.arange(len(rows))).sum() == (everything.targets != -100).sum() == one.counts[split].counted
        assert one.counts[split].documents == len(found[split])
        assert (one.counts[split].rows == len(found[split])) is (not pack)


def test_packed_rows_hold_several_documents(tokenizer: Path, files: Path) -> None:
    [one] = store.read_meta(run(tokenizer, files)).sets
    assert one.counts["train"].rows * 2 < one.counts["train"].documents
    assert one.fill("train", CONTEXT) > 0.8


def test_copies_stay_together(tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", chats(20))
    write_jsonl(tmp_path / "in/b.jsonl", chats(20)[::-1])
    folder = run(tokenizer, tmp_path / "in", holdout=0.3)
    assert not set(documents(folder, tokenizer, "train")) & set(documents(folder, tokenizer, "validation"))


def test_second_call_uses_the_cache(tokenizer: Path, files: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(tokenizer, files)
    assert builds == ["0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"]
    before = content(folder)
    assert run(tokenizer, files) == folder and content(folder) == before and len(builds) == 4
    for path in [*files.iterdir(), *tokenizer.iterdir()]:  # only the digests of files older than a few seconds are cached
        os.utime(path, (1, 1))
    assert run(tokenizer, files) == folder


def test_other_inputs_have_other_folders(tokenizer: Path, files: Path, tmp_path: Path, builds: list[str]) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(tiny.CHATML.replace("user", "human"))
    folders = [run(tokenizer, files)]
    folders += [run(tokenizer, files, **change) for change in ({"pack": False}, {"holdout": 0.3}, {"on_long": "truncate"})]
    folders.append(run(tokenizer, files, context=CONTEXT + 1))
    assert len(builds) == 4  # rendering depends on none of these
    folders += [run(tokenizer, files, mask="all"), run(tokenizer, files, chat_template=template)]
    assert len(builds) == 12
    other = tiny.save_tokenizer(tmp_path / "tokenizer", tiny.LLAMA)
    folders.append(run(other, files))
    assert len(builds) == 16
    write_jsonl(files / "2.jsonl", chats(11, 20))
    folders.append(run(tokenizer, files))
    assert builds[16:] == ["2.jsonl"]
    assert len(set(folders)) == len(folders)
    assert run(tokenizer, files) == folders[-1]


def test_damaged_rows_are_rebuilt_and_reported(tokenizer: Path, files: Path, builds: list[str]) -> None:
    folder = run(tokenizer, files)
    whole = content(folder)
    for name, damage in (
        ("train-ids.bin", lambda path: path.write_bytes(path.read_bytes()[:-2])),
        ("train-mask.bin", lambda path: path.write_bytes(b"\x02" + path.read_bytes()[1:])),
        ("validation-rows.npy", Path.unlink),
        ("train-loss.npy", lambda path: path.write_bytes(b"")),
        ("meta.json", lambda path: path.write_text("{")),
        ("meta.json", Path.unlink),
    ):
        damage(folder / name)
        messages: list[str] = []
        data = DataSection(path=files, kind="chat")
        assert prepare.prepare(data, tokenizer, CONTEXT, messages.append) == folder
        assert len(messages) == 1 and "The rows in" in messages[0] and "are damaged" in messages[0]
        assert content(folder) == whole
    assert len(builds) == 4  # from the rendered inputs


def test_damaged_rendered_input_is_rendered_again(tokenizer: Path, files: Path, builds: list[str], capsys: Any) -> None:
    folder = run(tokenizer, files)
    whole = content(folder)
    [damaged, *_] = (path for path in (folder.parents[1] / "rendered").iterdir() if path.is_dir())
    (damaged / "tokens.bin").write_bytes(b"1234")
    (folder / "meta.json").unlink()
    prepare.prepare(DataSection(path=files, kind="chat"), tokenizer, CONTEXT)
    assert content(folder) == whole and len(builds) == 5
    assert "The rendered examples in" in capsys.readouterr().out


def test_interrupted_preparation_continues(
    tokenizer: Path, files: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def interrupt(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    data = DataSection(path=files, kind="chat")
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(data, tokenizer, CONTEXT, no_message, interrupt)
    assert seen == [(0, 4), (1, 4), (2, 4)] and builds == ["0.jsonl", "1.jsonl"]
    builds.clear()
    prepare.prepare(data, tokenizer, CONTEXT, no_message, lambda done, total: seen.append((done, total)))
    assert builds == ["2.jsonl", "3.jsonl"] and seen[-5:] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_failure_leaves_the_rendered_inputs_only(tokenizer: Path, files: Path, own_home: Path, builds: list[str]) -> None:
    (files / "2.jsonl").write_text('{"messages": 1}\n')
    with pytest.raises(UserError, match=r"Line 1 of .*2.jsonl has 'messages' that is a number"):
        run(tokenizer, files)
    assert list((own_home / ".strata/rows").iterdir()) == []
    assert len(list((own_home / ".strata/rendered").iterdir())) == 2
    write_jsonl(files / "2.jsonl", chats(10, 20))
    builds.clear()
    run(tokenizer, files)
    assert builds == ["2.jsonl", "3.jsonl"]


def test_equal_files_are_rendered_once(tokenizer: Path, tmp_path: Path, builds: list[str]) -> None:
    for folder in ("a", "b"):
        write_jsonl(tmp_path / "in" / folder / "x.jsonl", chats(10))
    folder = run(tokenizer, tmp_path / "in")
    assert builds == ["x.jsonl"]
    [one] = store.read_meta(folder).sets
    assert sum(one.examples.values()) == 20
    places = [place for index in range(one.counts["train"].rows) for place in Rows(folder, "train").places(index)]
    assert any("/a/x.jsonl" in place for place in places) and any("/b/x.jsonl" in place for place in places)


def test_moved_files_are_not_rendered_again(tokenizer: Path, files: Path, tmp_path: Path, builds: list[str]) -> None:
    run(tokenizer, files)
    folder = run(tokenizer, files.rename(tmp_path / "moved"))
    assert len(builds) == 4 and "/moved/" in Rows(folder, "train").places(0)[0]


def test_more_inputs_than_files_may_be_open(tokenizer: Path, tmp_path: Path) -> None:
    for number in range(150):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", chats(1, number))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 60, limits[1]))
    try:
        folder = run(tokenizer, tmp_path / "in")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sum(store.read_meta(folder).sets[0].examples.values()) == 150


PAIRS = [
    {"prompt": [user(f"What is {n}?")], "chosen": [assistant(f"It is {n}. " * (n % 4 + 1))], "rejected": [assistant("How?")]}
    for n in range(24)
]


@pytest.mark.parametrize("pack", [True, False])
def test_pairs_stay_together(tokenizer: Path, tmp_path: Path, pack: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    folder = run(tokenizer, path, kind="preference", pack=pack)
    assert store.read_meta(folder).objective == "pairs"
    for split in SPLITS:
        rows = Rows(folder, split)
        texts = documents(folder, tokenizer, split)
        assert len(texts) % 2 == 0
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            prompt = chosen.split("<|im_start|>assistant")[0]
            assert rejected == f"{prompt}<|im_start|>assistant\nHow?<|im_end|>" and "It is" in chosen
        batch = rows.read(np.arange(len(rows)))
        assert batch.documents == [len(rows.lengths(index)) for index in range(len(rows))]
        assert split == "validation" or (set(batch.documents) == {2}) is (not pack)


def test_answers_with_labels(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n}?", "completion": f" It is {n}.", "label": n % 3 == 0} for n in range(30)]
    folder = run(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows), kind="preference")
    assert store.read_meta(folder).objective == "labels"
    train = Rows(folder, "train")
    batch = train.read(np.arange(len(train)))
    assert batch.labels is not None and batch.documents == [len(labels) for labels in batch.labels]
    texts = documents(folder, tokenizer, "train")
    flat = [label for labels in batch.labels for label in labels]
    assert flat == [int(text.split("?")[0].split()[-1]) % 3 == 0 for text in texts] and True in flat and False in flat


def test_pairs_and_labels_cannot_be_mixed(tokenizer: Path, tmp_path: Path) -> None:
    rows = [*PAIRS[:2], {"prompt": "a", "completion": "b", "label": True}]
    with pytest.raises(UserError) as raised:
        run(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows), kind="preference")
    assert f"pairs (line 1 of {tmp_path}/a.jsonl) and answers with a label (line 3 of" in raised.value.cause


def test_several_sets_have_rows_of_their_own(tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(20))
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"hello {n}", "completion": f" fine {n}"} for n in range(30)])
    (tmp_path / "c").mkdir()
    for number in range(9):
        (tmp_path / "c" / f"{number}.txt").write_text(f"the cat {number} sat on a mat. " * 40)
    sets = (
        DataSetSection(path=tmp_path / "a.jsonl", kind="chat", weight=3, name="chats"),
        DataSetSection(path=tmp_path / "b.jsonl", kind="completion"),
        DataSetSection(path=tmp_path / "c", kind="text"),
    )
    folder = prepare.prepare(DataSection(sets=sets), tokenizer, CONTEXT, no_message)
    assert [one.title for one in store.read_meta(folder).sets] == ["chats", "b.jsonl", "c"]
    for split in SPLITS:
        rows = Rows(folder, split)
        assert len(rows.sizes) == 3 and sum(rows.sizes) == len(rows) and min(rows.sizes) > 0
        kinds = [{Path(place.split(" of ")[1]).suffix for place in rows.places(index)} for index in range(len(rows))]
        names = [Path(rows.places(index)[0].split(" of ")[1]).name for index in range(len(rows))]
        assert all(len(kind) == 1 for kind in kinds)
        assert [name == "a.jsonl" for name in names] == [True] * rows.sizes[0] + [False] * (rows.sizes[1] + rows.sizes[2])
        assert all(name.endswith(".txt") for name in names[rows.sizes[0] + rows.sizes[1] :])
    reweighted = (sets[0].model_copy(update={"weight": 9}), *sets[1:])
    assert prepare.prepare(DataSection(sets=reweighted), tokenizer, CONTEXT, no_message) == folder  # weights are the order's


def test_long_texts_are_split(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on a mat. " * 200)
    (tmp_path / "b.txt").write_text("the dog ran to its house. " * 200)
    folder = prepare.prepare(DataSection(path=tmp_path, holdout=0.4), tokenizer, 32, no_message)
    joined = "".join(documents(folder, tokenizer, "train") + documents(folder, tokenizer, "validation"))
    assert joined.count("</s>") == 2
    [one] = store.read_meta(folder).sets
    assert one.examples == {"train": 1, "validation": 1} and one.counts["train"].documents > 10
    assert one.counts["train"].counted == one.counts["train"].tokens - one.counts["train"].documents


@pytest.mark.parametrize("rows", [chats(1), chats(1) * 5])
def test_one_example_is_refused(tokenizer: Path, tmp_path: Path, rows: list[Any]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=r"'a.jsonl' cannot be split into training and validation: .* \(line 1 of .*a.jsonl\)"):
        run(tokenizer, path)


def test_two_examples_are_one_of_each(tokenizer: Path, tmp_path: Path) -> None:
    [one] = store.read_meta(run(tokenizer, write_jsonl(tmp_path / "a.jsonl", chats(2)))).sets
    assert one.examples == {"train": 1, "validation": 1}


def test_set_without_examples_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/readme.md").write_text("x")
    with pytest.raises(UserError, match="The set 'in' has no examples"):
        run(tokenizer, tmp_path / "in")
    (tmp_path / "in/a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="The set 'in' has no examples"):
        run(tokenizer, tmp_path / "in")


def test_examples_that_are_all_too_long_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"messages": [user("a" * (200 - n)), assistant(f"b{n}")]} for n in range(3)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as raised:
        run(tokenizer, path, context=64)
    assert "All examples of the set 'a.jsonl' are longer than model.context=64 tokens: the shortest has" in raised.value.cause
    assert f"(line 3 of {path})" in raised.value.cause
    with pytest.raises(UserError, match="All examples of the set"):  # no answer begins in the first 64 tokens
        run(tokenizer, path, context=64, on_long="truncate")


def test_long_examples_are_dropped_or_truncated(tokenizer: Path, tmp_path: Path) -> None:
    rows = [*chats(10), {"messages": [user("hello"), assistant("fine " * 300)]}, {"messages": [user("a" * 900), assistant("b")]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    dropped, cut = run(tokenizer, path), run(tokenizer, path, on_long="truncate")
    assert store.read_meta(dropped).notes == [
        f"2 of 12 examples left out: longer than model.context=128 tokens, the first at line 11 of {path}."
    ]
    assert store.read_meta(cut).notes == [
        f"1 of 12 examples left out: without a counted token in the first 128 (model.context), the first at line 12 of {path}."
    ]
    for folder, count in ((dropped, 10), (cut, 11)):
        assert sum(store.read_meta(folder).sets[0].examples.values()) == count
    texts = documents(cut, tokenizer, "train") + documents(cut, tokenizer, "validation")
    [long] = [text for text in texts if "fine fine" in text]
    assert "<|im_end|>\n<|im_start|>assistant\nfine fine" in long and not long.endswith("<|im_end|>")


def test_notes_and_special_tokens(tokenizer: Path, files: Path) -> None:
    write_jsonl(files / "4.jsonl", [{"messages": [user("What is </s>?"), assistant("the end")]}])
    (files / "readme.md").write_text("x")
    (files / "gone").symlink_to(files / "nowhere")
    meta = store.read_meta(run(tokenizer, files))
    assert meta.notes == [
        "2 of 7 files left out: gone (a broken symbolic link), readme.md (not JSONL or Parquet).",
        f"1 examples contain names of special tokens, which are read as special tokens, the first at line 1 of {files}/4.jsonl.",
    ]
    assert [(name, place.split(" of ")[0]) for _, name, place in meta.special] == [
        ("</s>", "line 1"),
        ("<|im_start|>", "line 1"),
        ("<|im_end|>", "line 1"),
    ]
    assert meta.special[0][2].endswith("4.jsonl") and meta.special[1][2].endswith("0.jsonl")
    loaded = load_tokenizer(tokenizer)
    assert [token for token, _, _ in meta.special] == loaded.convert_tokens_to_ids(["</s>", "<|im_start|>", "<|im_end|>"])
    assert meta.pad == loaded.eos_token_id


def test_template_that_cannot_be_read(tokenizer: Path, files: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.chat_template=.*/t.jinja cannot be read: No such file"):
        run(tokenizer, files, chat_template=tmp_path / "t.jinja")
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"data\.chat_template=.*/t.jinja cannot be read: it is not UTF-8"):
        run(tokenizer, files, chat_template=tmp_path / "t.jinja")


def test_cache_that_cannot_be_written_is_named(tokenizer: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._Writer, "add_row", full)
    with pytest.raises(UserError, match=r"rows/\w+ cannot be written: No space left on device"):
        run(tokenizer, files)


SCRIPT = """
import sys, time
from pathlib import Path
from strata.platform.recipe import DataSection
from strata.training.data.finetuning import parallel, prepare

def progress(done, total):
    print(done, flush=True)
    time.sleep(0.2)

if __name__ == "__main__":
    if sys.argv[3] == "processes":
        parallel.POOL_LEAST_BYTES = 0
        parallel.os.cpu_count = lambda: 2
    prepare.prepare(DataSection(path=Path(sys.argv[1]), kind="chat"), Path(sys.argv[2]), 128, print, progress)
"""


def start(script: Path, *arguments: object) -> subprocess.Popen[str]:
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_killed_preparation_continues(tokenizer: Path, files: Path, tmp_path: Path, own_home: Path, builds: list[str]) -> None:
    process = start(tmp_path / "run.py", files, tokenizer, "plain")
    assert process.stdout is not None
    while process.stdout.readline().strip() != "2":
        assert process.poll() is None
    process.kill()
    process.wait(timeout=30)
    assert list((own_home / ".strata/rows").glob("[!.]*")) == []
    folder = run(tokenizer, files)
    assert builds[0] == "2.jsonl" or builds[0] == "3.jsonl"
    assert not list((own_home / ".strata").glob("*/.building-*"))
    (own_home / ".strata").rename(tmp_path / "killed")
    assert content(run(tokenizer, files)) == content(tmp_path / "killed/rows" / folder.name)


@pytest.mark.slow
def test_processes_write_the_same_bytes(tokenizer: Path, files: Path, tmp_path: Path, own_home: Path) -> None:
    process = start(tmp_path / "run.py", files, tokenizer, "processes")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and output.split() == ["0", "1", "2", "3", "4"]
    (own_home / ".strata").rename(tmp_path / "pool")
    folder = run(tokenizer, files)
    for path in (own_home / ".strata/rendered").iterdir():
        assert content(path) == content(tmp_path / "pool/rendered" / path.name)
    assert content(folder) == content(tmp_path / "pool/rows" / folder.name)


@pytest.mark.slow
def test_error_in_a_process_is_the_users(tokenizer: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "POOL_LEAST_BYTES", 0)
    monkeypatch.setattr(parallel.os, "cpu_count", lambda: 2)
    for name in ("1.jsonl", "3.jsonl"):
        (files / name).write_text('{"messages": 1}\n')
    with pytest.raises(UserError, match=r"Line 1 of .*1.jsonl has 'messages' that is a number"):
        run(tokenizer, files)


@pytest.mark.slow
def test_processes_end_with_the_command(tokenizer: Path, files: Path, tmp_path: Path) -> None:
    import psutil

    process = start(tmp_path / "run.py", files, tokenizer, "processes")
    assert process.stdout is not None
    while process.stdout.readline().strip() != "1":
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
