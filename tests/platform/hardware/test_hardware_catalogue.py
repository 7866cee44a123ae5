"""Catalogue files of GPUs and fabrics: spellings, suggestions, checks, and this machine's figures."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from strata.platform.errors import UserError
from strata.platform.hardware import catalogue, catalogue_file, machine
from strata.platform.hardware.catalogue_file import nearest, parse
from strata.platform.hardware.specs import FP8_SHARE, Device, Fabric, Gpu


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Entry:
    name: str
    size: int
    inner: Inner | None = None


def entries(**more: Any) -> dict[str, dict[str, Any]]:
    return {"gpt-3-1.3b": {"size": 1}, "gpt-3-13b": {"size": 13}, "llama_2 7b": {"size": 7, "also": ["The Llama"]}} | more


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("gpt-3-1.3b", 1),
        ("GPT3 1.3B", 1),
        ("gpt313b", 13),
        ("gpt_3_13b", 13),
        ("llama27b", 7),
        ("the-llama", 7),
        ("Llama-2-7.B", 7),  # a dot that is not in the name
    ],
)
def test_spellings(written: str, size: int) -> None:
    found = parse(entries(), Entry, "file")
    assert found.find("model", written).size == size
    assert written in found


def test_a_name_without_its_dot_is_found_unless_it_is_another() -> None:
    alone = parse({"gpt-3-1.3b": {"size": 1}}, Entry, "file")
    assert alone.find("model", "gpt-3-13b").size == 1
    assert "gpt-4" not in alone
    with pytest.raises(UserError, match="There is no model 'gpt-4' in the catalogue"):
        alone.find("model", "gpt-4")


def test_suggestions() -> None:
    keys = parse(entries(), Entry, "file").keys
    assert nearest("gpt-3-14b", keys) in ("Did you mean gpt-3-13b or gpt-3-1.3b?", "Did you mean gpt-3-1.3b or gpt-3-13b?")
    assert nearest("???", keys) == "There are gpt-3-1.3b, gpt-3-13b, llama_2 7b."
    many = {f"model{letter}": f"model-{letter}" for letter in "abcdef"}
    assert nearest("modelx", many).count(" or ") == 2  # three at most
    # Similar by half of its letters: 2 x 3 / (3 + 9); one letter more is too far.
    assert nearest("abc", {"abcdefghi": "nine"}) == "Did you mean nine?"
    assert nearest("abc", {"abcdefghij": "ten"}) == "There are ten."
    crowded = {f"abcd{digit}": "one" for digit in range(6)} | {"abcdefg": "two"}  # six keys are compared
    assert nearest("abcd", crowded) == "Did you mean one?"
    assert nearest("abcd", {key: name for key, name in crowded.items() if key != "abcd0"}).endswith(" or two?")
    # Several keys of an entry count once, and do not crowd out the others.
    twins = {"abcd1": "one", "abcd2": "one", "abcd3": "one", "abcd4": "two"}
    assert sorted(nearest("abcd", twins).removeprefix("Did you mean ").rstrip("?").split(" or ")) == ["one", "two"]


def test_entries_are_checked() -> None:
    with pytest.raises(UserError, match="file: a has no field 'sise'") as caught:
        parse({"a": {"sise": 1}}, Entry, "file")
    assert caught.value.fix == "Its fields are size, inner."
    with pytest.raises(UserError, match=r"file: a\.inner has no field 'sise'"):
        parse({"a": {"size": 1, "inner": {"sise": 1}}}, Entry, "file", {"inner": Inner})
    assert parse({"a": {"size": 1, "inner": {"size": 2}}}, Entry, "file", {"inner": Inner}).entries["a"] == Entry(
        "a", 1, Inner(2)
    )
    with pytest.raises(UserError, match="file: a: size: "):
        parse({"a": {"size": "many"}}, Entry, "file")
    with pytest.raises(UserError, match="file: B has the name 'A' of a"):
        parse({"a": {"size": 1}, "B": {"size": 1, "also": ["A"]}}, Entry, "file")
    with pytest.raises(UserError, match="file: a has no field 'name'"):
        parse({"a": {"size": 1, "name": "b"}}, Entry, "file")
    same = parse({"a": {"size": 1, "also": ["A", "a"]}}, Entry, "file")  # its own name is no conflict
    assert list(same.entries) == ["a"]


def test_entries_with_memory_are_gpus_and_the_others_devices() -> None:
    raw = catalogue_file.read(catalogue.FOLDER / "gpus.yaml")
    planned = [name for name, entry in raw.items() if "memory" in entry]
    assert catalogue.gpu_names() == planned and len(planned) < len(raw)
    assert all(isinstance(catalogue.gpu(name), Gpu) and catalogue.has_gpu(name) for name in planned)
    assert not any(catalogue.has_gpu(name) for name in raw if name not in planned)
    family = catalogue.device_named("NVIDIA H100 NVL")
    assert type(family) is Device
    assert catalogue.device_named("nvidia h200") == catalogue.gpu("h200")  # in any case of letters
    assert catalogue.device_named("An unknown card") is None


def test_defaults_of_a_fabric() -> None:
    assert Fabric("x", 1.0, 2) == Fabric("x", 1.0, 2, "infiniband", "rail", 1.0)
    assert FP8_SHARE == 0.9
    assert [catalogue.fabric(name).name for name in catalogue.fabric_names()] == catalogue.fabric_names()


@pytest.mark.parametrize(
    ("most", "current", "expected"),
    [("5000", "2000", 3000), ("90000", "2000", 10_000), ("2000", "5000", 0), ("max", "2000", 10_000), (None, None, 10_000)],
)
def test_available_memory(
    most: str | None, current: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has 10,000 bytes free, or what the container's limit leaves."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    for name, text in (("memory.max", most), ("memory.current", current)):
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n")
    assert machine.available_memory() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("processor\t: 0\nmodel name\t: A CPU: fast\nmodel name\t: other\n", "A CPU: fast"), ("vendor\t: x\n", "by platform")],
)
def test_processor(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "processor", lambda: "by platform")
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert machine.processor() == expected


def test_processor_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(machine.platform, "processor", lambda: "by platform")
    monkeypatch.setattr(Path, "read_text", missing)
    assert machine.processor() == "by platform"
