"""AOTInductor package: greedy tokens of 20 prompts, and programs in Python and C++ that load it without Strata."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import ROOT
from tokenizers import Tokenizer

from strata.training.deployment import model_folder, runners
from strata.training.deployment.step import cache_shape

from ..faults import strata
from .conftest import padded

ALONE = """
import runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
assert not {"strata", "transformers"} & set(sys.modules)
"""


@pytest.mark.rotation
def test_a_package_and_the_programs_that_load_it(
    folder_of: Callable[..., Path], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = folder_of("mistral", num_hidden_layers=2), tmp_path / "model.pt2"
    assert strata("export", str(folder), "--package", str(file), "--tokens", "8") == 0
    assert "160 of 160" in capsys.readouterr().out
    model = model_folder.load(folder, "float32", "cpu")
    padded(model, runners.package_runner(file), cache_shape(model))

    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = words.encode("the cat sat on a mat").ids
    end, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    text = words.decode(expected[: expected.index(end)] if end in expected else expected)
    script = [str(ROOT / "examples" / "packaged_model.py"), str(file), str(folder / "tokenizer.json")]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *script, "the cat sat on a mat", "--tokens", "12"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == ("the cat sat on a mat" + text).rstrip("\n")

    build = tmp_path / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", str(ROOT / "examples"), "-B", str(build), prefix], ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([build / "packaged_model", file, "12", *map(str, ids)], capture_output=True, text=True)
    assert done.stdout.split() == [str(token) for token in expected], done.stderr
