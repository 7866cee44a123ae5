"""Import rules between packages, and top-level folders that share names with other packages."""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import platform
assert platform.system() == "Linux", platform
from transformers.utils import is_kernels_available
assert not is_kernels_available(), "transformers mistakes the folder for Hugging Face's kernels"
"""


def probe(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", PROBE, str(root)], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_repository_root_shadows_no_package(root: Path) -> None:
    answer = probe(root)
    assert answer.returncode == 0, answer.stderr


def test_the_probe_can_fail(tmp_path: Path) -> None:
    (tmp_path / "platform").mkdir()
    (tmp_path / "platform" / "__init__.py").touch()
    assert "AttributeError" in probe(tmp_path).stderr


def test_namespace_folders_have_no_init(root: Path) -> None:
    assert not list(root.glob("*/__init__.py"))
    assert not list(root.glob("*/strata/__init__.py"))


# Packages that each package may import.
PACKAGES = {
    "platform": set(),
    "planner": {"platform"},
    "monitoring": {"platform"},
    "training": {"platform", "planner", "kernels"},
    "serving": {"platform", "planner", "kernels"},
    "kernels": {"platform"},
    "deploy": {"platform"},
    "dashboards": {"platform", "monitoring"},
}
# Folders of a package that each folder may import, lowest first. Every folder may also import the package's own modules.
FOLDERS = {
    "planner.catalogue": set(),
    "planner.pipeline": set(),
    "planner.collectives": {"catalogue"},
    "planner.serving": {"catalogue"},
    "planner.step": {"catalogue", "collectives", "pipeline"},
    "planner.reliability": {"catalogue", "serving"},
    "planner.cluster": {"catalogue", "reliability", "serving"},
    "planner.memory": {"catalogue", "pipeline", "step"},
    "planner.search": {"catalogue", "collectives", "memory", "pipeline", "step"},
    "planner.validation": {"catalogue", "collectives", "memory", "step"},
    "planner.cli": {
        "catalogue",
        "cluster",
        "collectives",
        "memory",
        "pipeline",
        "reliability",
        "search",
        "serving",
        "step",
        "validation",
    },
    "planner.diffusion": {"cli", "collectives", "step", "validation"},
    "serving.api": set(),
    "serving.tenants": {"api"},
    "serving.routing": set(),
    "serving.transport": {"routing"},
    "serving.models": set(),
    "serving.adapters": {"api", "models", "transport"},
    "serving.ray_patches": set(),
    "serving.speculation": {"models", "routing"},
    "serving.kv_offload": set(),
    "serving.metrics": {"routing"},
    "serving.catalogue": {"adapters", "api", "transport"},
    "serving.page": {"transport"},
    "serving.scaling": {"transport"},
    "serving.gpu_sharing": set(),
    "serving.vllm_patches": {"kv_offload", "metrics", "routing", "scaling"},
    "serving.engine": {
        "adapters",
        "api",
        "kv_offload",
        "metrics",
        "models",
        "routing",
        "scaling",
        "speculation",
        "tenants",
        "transport",
        "vllm_patches",
    },
    "serving.gateway": {"adapters", "api", "catalogue", "engine", "metrics", "page", "routing", "tenants", "transport"},
    "serving.batches": {"api", "gateway", "tenants"},
    "serving.diffusion": {"api", "engine", "metrics", "transport"},
    "serving.fork_server": {"engine", "ray_patches", "vllm_patches"},
    "serving.runtime": {
        "adapters",
        "api",
        "batches",
        "catalogue",
        "diffusion",
        "engine",
        "fork_server",
        "gateway",
        "metrics",
        "models",
        "ray_patches",
        "scaling",
        "speculation",
        "tenants",
        "transport",
    },
    "serving.chaos": {"metrics", "models"},
    "serving.simulation": {"api", "engine", "gateway", "ray_patches", "routing", "scaling", "tenants", "transport"},
    "serving.bench": {"api", "engine", "gateway", "kv_offload", "metrics", "models", "speculation", "tenants", "vllm_patches"},
    "serving.calibration": {"bench", "simulation"},
    "serving.profile": {"bench", "engine", "runtime"},
    "training.data": set(),
    "training.model": set(),
    "training.metrics": set(),
    "training.logs": set(),
    "training.patches": set(),
    "training.schedule": {"metrics"},
    "training.watchdog": {"metrics"},
    "training.diffusion": {"data"},
    "training.parallel": {"diffusion", "model"},
    "training.elastic": {"metrics", "patches"},
    "training.exclusion": {"elastic", "watchdog"},
    "training.preferences": {"data"},
    "training.checkpoint": {"data", "diffusion", "metrics", "model", "parallel", "schedule"},
    "training.distillation": {"checkpoint", "model", "quantization"},
    "training.memory_copies": {"checkpoint", "metrics", "parallel"},
    "training.evaluation": {"checkpoint", "data", "metrics"},
    "training.deployment": {"checkpoint"},
    "training.quantization": {"checkpoint", "data", "deployment"},
    "training.bench": {"data", "memory_copies", "metrics", "model", "schedule"},
    "training.profile": {"bench", "data", "metrics", "model", "parallel"},
    "kernels.tuning": set(),
    "kernels.ops": {"tuning"},
    "kernels.ladder": set(),
    "kernels.compiler": {"ladder", "ops", "tuning"},
    "kernels.vllm_plugin": {"compiler", "ops"},
    "kernels.graph": {"ops"},
    "kernels.bench": {"compiler", "graph", "ladder", "ops", "tuning", "vllm_plugin"},
    "kernels.device": set(),
    "monitoring.gpu": set(),
    "monitoring.prometheus": {"gpu"},
    "monitoring.top": {"gpu"},
    "platform.hardware": set(),
    "platform.profile": set(),
    "platform.recipe": set(),
    "platform.model_families": {"recipe"},
    "platform.ray_patches": set(),
    "platform.ray_cluster": {"ray_patches"},
    "deploy.kuberay": set(),
    "deploy.teams": {"kuberay"},
    "deploy.networks": set(),
    "deploy.addons": set(),
    "deploy.checks": set(),
    "dashboards.boards": set(),
    "dashboards.bench": {"boards"},
}
MOST_MODULES = 15  # in one folder


@pytest.fixture(scope="module")
def imports(root: Path) -> dict[str, set[str]]:
    """Strata modules that each module imports, at any level."""
    files = {_name(file.relative_to(strata)): file for strata in root.glob("*/strata") for file in strata.rglob("*.py")}
    return {name: set(_imported(file, files)) - {name} for name, file in files.items()}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path, known: Collection[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in (each.removeprefix("strata.") for each in names if each.startswith("strata.")):
            yield name if name in known else name.rpartition(".")[0]


def _folder(name: str, imports: Mapping[str, set[str]]) -> str | None:
    """Folder of a package that a module is in; None for the package's own modules."""
    parts = name.split(".")
    inside = len(parts) > 2 or (len(parts) == 2 and any(other.startswith(f"{name}.") for other in imports))
    return parts[1] if inside else None


@pytest.mark.slow
def test_packages_import_only_allowed_packages(imports: dict[str, set[str]]) -> None:
    for name, others in imports.items():
        package = name.split(".")[0]
        for other in others:
            assert other.split(".")[0] in PACKAGES[package] | {package}, f"{name} imports {other}"


def test_folders_import_only_allowed_folders(imports: dict[str, set[str]]) -> None:
    for name, others in imports.items():
        package, folder = name.split(".")[0], _folder(name, imports)
        if folder is None:
            continue
        for other in others:
            if other.split(".")[0] == package and (theirs := _folder(other, imports)) not in (None, folder):
                assert theirs in FOLDERS[f"{package}.{folder}"], f"{name} imports {other}"


@pytest.mark.slow
def test_imports_have_no_cycles(imports: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" imports ".join(circle.args[1][::-1]))


def test_folders_have_at_most_fifteen_modules(root: Path) -> None:
    folders = {file.parent for strata in root.glob("*/strata") for file in strata.rglob("*.py")}
    for folder in folders | {file.parent for file in (root / "tests").rglob("test_*.py")}:
        modules = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, folder


def test_operations_import_torch_and_triton_only(root: Path) -> None:
    """Code for the command line, vLLM and other kernel libraries is in other folders."""
    kernels = root / "kernels/strata/kernels"
    for file in [*(kernels / "ops").rglob("*.py"), *(kernels / "tuning").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name.startswith("strata.kernels.") or name == "strata.kernels"
                known = name.split(".")[0] in {"torch", "triton", "numpy"} | sys.stdlib_module_names
                assert ours or known, f"{file}: {name}"
