"""The name of a folder of KV blocks: another one for everything that decides a block's content."""

import os
from pathlib import Path

from strata.serving.kv_offload import fingerprint


def model(folder: Path, weights: bytes = b"1234" * 1000) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_same_content_has_the_same_name(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    assert fingerprint.of([str(one)], {"a": 1}) == fingerprint.of([str(other), str(other)], {"a": 1})


def test_changed_weights_have_another_name(tmp_path: Path) -> None:
    folder = model(tmp_path / "one")
    names = {fingerprint.of([str(folder)], {})}
    weights, before = folder / "model.safetensors", (folder / "model.safetensors").stat()
    weights.write_bytes(b"1234" * 999 + b"1235")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size and time
    names.add(fingerprint.of([str(folder)], {}))
    (folder / "tokenizer.json").write_text("{ }")
    names.add(fingerprint.of([str(folder)], {}))
    (folder / "adapter_model.safetensors").write_bytes(b"1")
    names.add(fingerprint.of([str(folder)], {}))
    names.add(fingerprint.of([str(folder)], {"dtype": "float32"}))
    names.add(fingerprint.of([str(folder)], {"dtype": "bfloat16"}))
    assert len(names) == 6
