"""Every script of `examples/`, run as a user runs it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, TINY

from strata.platform import ports

EXAMPLES = ROOT / "examples"


def run(script: str, *words: str, home: Path, limit_s: float = 300) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words],
        env=os.environ | {"STRATA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_layout_is_planned_and_searched(own_home: Path) -> None:
    out = run("plan.py", "--gpus", "256", home=own_home)
    assert "llama-3-70b on 256 h100" in out and "fits: True" in out
    steps = [float(seconds) for seconds in re.findall(r"step ([\d.]+) s", out)]
    assert len(steps) == 4 and min(steps[1:]) <= steps[0], "the search finds a layout that is as fast"


@pytest.mark.slow
def test_kernels_train_a_torch_module(own_home: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run("kernel_in_your_model.py", home=own_home))]
    assert losses[0] > 5 and losses[-1] < losses[0] / 2


@pytest.mark.rotation
def test_a_device_of_its_own_has_the_losses_of_the_cpu(own_home: Path) -> None:
    out = run("train_on_device.py", "--steps", "4", "model.context=64", home=own_home, limit_s=500)
    assert float(re.findall(r"largest difference ([\d.e+-]+)", out)[0]) < 1e-4
    assert "allocated_bytes" in out and "strata::linear_cross_entropy" in out


@pytest.mark.rotation
def test_a_run_is_trained_and_resumed_in_another_layout(own_home: Path, trained: Path) -> None:
    """`train.py` writes the run that `resume_in_another_layout.py` continues: two Ray clusters in all."""
    few = [
        *TINY,
        "train.steps=4",
        "train.warmup=1",
        "train.checkpoint_every=4",
        "train.eval_every=2",
        f"data.path={trained / 'corpus'}",
    ]
    out = run("train.py", "--run", "mine", *few, home=own_home)
    assert "run mine: step 4" in out and re.search(r"validation loss \d+\.\d+", out)
    assert (own_home / "runs" / "mine" / "export" / "config.json").is_file()
    out = run("resume_in_another_layout.py", "--run", "mine", "--steps", "2", home=own_home)
    assert "run mine: step 6" in out and "two tensor-parallel workers" in out
    before, after = (float(loss) for loss in re.findall(r"loss around the change: ([\d.]+) -> ([\d.]+)", out)[0])
    assert abs(before - after) < 1, "the model continues; a fresh one would be at the log of its vocabulary"


@pytest.mark.rotation
def test_a_folder_is_served_and_called(own_home: Path, trained: Path) -> None:
    folder = shutil.copytree(trained / "runs" / "tiny" / "export", own_home / "tiny")
    with ports.reserve() as held:
        words = ["serve.prefill.replicas=0", f"serve.port={held.port}", "--model", str(folder), "--max-tokens", "8"]
        out = run("serve_and_call.py", *words, home=own_home)
        last = out.splitlines()[-1]  # the answer of so small a model may be blank
        assert f"tiny is ready at {held.url}" in out and last.startswith("import") and len(last) > len("import ")
        assert ports.is_free(held.port)


@pytest.mark.parametrize("file", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_the_readme_lists_every_example(file: str) -> None:
    assert f"[{file}]({file})" in (EXAMPLES / "README.md").read_text()
    assert len((EXAMPLES / file).read_text().splitlines()) <= 60
