"""The rooms' folder names are those of other packages; nothing may notice."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import platform
assert platform.system() == "Linux", platform
from transformers.utils import is_kernels_available
assert not is_kernels_available(), "transformers takes our folder for Hugging Face's kernels"
"""


def probe(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", PROBE, str(root)], capture_output=True, text=True, env=environment)


def test_repository_root_shadows_nothing(root: Path) -> None:
    answer = probe(root)
    assert answer.returncode == 0, answer.stderr


def test_the_probe_can_fail(tmp_path: Path) -> None:
    (tmp_path / "platform").mkdir()
    (tmp_path / "platform" / "__init__.py").touch()
    assert "AttributeError" in probe(tmp_path).stderr


def test_no_init_where_it_would_shadow(root: Path) -> None:
    assert not list(root.glob("*/__init__.py"))
    assert not list(root.glob("*/strata/__init__.py"))


ALLOWED = {
    "platform/strata/platform": {"platform"},
    "platform/strata/planner": {"platform", "planner"},
    "platform/strata/monitoring": {"platform", "monitoring"},
    "training/strata": {"platform", "planner", "training", "kernels"},
    "serving/strata": {"platform", "serving", "kernels"},
    "kernels/strata": {"platform", "kernels"},
    "infra/strata": {"platform", "deploy"},
    "dashboards/strata": {"platform", "monitoring", "dashboards"},
}


@pytest.mark.parametrize("folder", ALLOWED)
def test_rooms_know_only_whom_they_may(root: Path, folder: str) -> None:
    for file in (root / folder).rglob("*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]) and words[1].startswith("strata."):
                assert words[1].split(".")[1] in ALLOWED[folder], f"{file}: {line}"


def test_operations_know_torch_and_triton_only(root: Path) -> None:
    """What has to do with the command line, vLLM or other people's kernels lies in modules and folders of its own."""
    outside = {"commands.py", "catalog.py", "tuner.py"}
    for file in set((root / "kernels/strata/kernels").glob("*.py")):
        if file.name in outside:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name.startswith("strata.kernels.") or name == "strata.kernels"
                known = name.split(".")[0] in {"torch", "triton", "numpy"} | sys.stdlib_module_names
                assert ours or known, f"{file}: {name}"
