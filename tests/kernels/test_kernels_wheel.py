"""The wheel strata-kernels on its own: built, unpacked, and used by a process that cannot import the rest of Strata."""

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.rotation

# Modules that the wheel's modules may import: its dependencies, and those of `patch` and of the vLLM plugin.
ALLOWED = {"torch", "triton", "numpy", "transformers", "vllm"} | sys.stdlib_module_names

PROGRAM = """
import importlib.util, json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM

import strata.kernels

refused = [name for name in ("strata.platform", "strata.training", "strata.kernels.bench") if importlib.util.find_spec(name)]
torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
heads = dict(num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**shape, **heads, attn_implementation="sdpa")).train()
ids = torch.randint(64, (2, 12))


def trained(function):
    model.zero_grad()
    loss = function(ids)
    loss.backward()
    return [float(loss.detach())], torch.cat([one.grad.flatten() for one in model.parameters()]).tolist()


def loss(ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


plain = trained(loss)
compiled = trained(torch.compile(loss, backend="strata", fullgraph=True, options={"tail": "aot_eager"}))
changed = strata.kernels.patch(model)
patched = trained(loss)
print(json.dumps({
    "file": strata.kernels.__file__, "refused": refused, "backends": torch._dynamo.list_backends(exclude_tags=()),
    "changed": changed, "plain": plain, "compiled": compiled, "patched": patched,
}))
"""


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel. hatchling comes from uv's cache, or else from the package index."""
    built = tmp_path_factory.mktemp("wheel")
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    command = [uv, "build", "--wheel", "--python", sys.executable, "--out-dir", str(built), str(root / "kernels")]
    done = subprocess.run([*command, "--offline"], capture_output=True, text=True)
    if done.returncode:
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = built.glob("strata_kernels-*.whl")
    target = built / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture(scope="module")
def answer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of the program, which runs without `site`: it sees the wheel and the environment's packages, but neither Strata nor
    its entry points."""
    packages = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("strata") and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(packages)])
    command = [sys.executable, "-S", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def close(ours: list[float], truth: list[float]) -> None:
    assert ours == pytest.approx(truth, rel=1e-4, abs=1e-6)


def test_a_model_is_patched_without_the_rest_of_strata(folder: Path, answer: dict[str, Any]) -> None:
    assert answer["file"].startswith(str(folder)) and answer["refused"] == []
    assert answer["changed"]["rms_norm"] == 5 and {"rope", "swiglu"} <= set(answer["changed"])
    for ours, truth in zip(answer["patched"], answer["plain"], strict=True):
        close(ours, truth)


def test_torch_finds_the_backend(answer: dict[str, Any]) -> None:
    assert "strata" in answer["backends"]
    for ours, truth in zip(answer["compiled"], answer["plain"], strict=True):
        close(ours, truth)


def test_modules_import_only_dependencies_of_the_wheel(folder: Path) -> None:
    files = list((folder / "strata").rglob("*.py"))
    ours = {".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert len(files) > 40 and (folder / "strata/kernels/ladder/cuda/naive.cu").is_file()
    assert list((folder / "strata/kernels/tuning/tuned").glob("sm_*.json")), "launch configurations are missing"
    assert not list((folder / "strata").glob("*.py")), "strata is a namespace that other packages share"
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name in ours or name.split(".")[0] in ALLOWED, f"{file.relative_to(folder)} imports {name}"


def test_both_packages_agree(root: Path) -> None:
    """The later of two installed wheels overwrites the earlier one's files: they must be the same."""
    whole, part = (tomllib.loads((root / path).read_text())["project"] for path in ("pyproject.toml", "kernels/pyproject.toml"))
    for key in ("version", "requires-python", "license"):
        assert part[key] == whole[key], key
    for group, names in part["entry-points"].items():
        assert names.items() <= whole["entry-points"][group].items(), group
    pinned = set(whole["optional-dependencies"]["laptop"])
    assert {one.replace(">=", "==") for one in part["dependencies"] if ">=" in one} <= pinned
