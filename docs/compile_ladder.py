"""Compiles the steps of docs/kernel-ladder.md and records what the compilers made of them, for its table.

PYTHONPATH=kernels:platform .venv/bin/python docs/compile_ladder.py
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from strata.kernels.compiler.show import Variant, compilations
from strata.kernels.compiler.stages import compile_stages
from strata.kernels.compiler.view import as_json
from strata.kernels.ladder.nvcc import nvcc
from strata.platform import benchmark_record
from strata.platform.files import write_atomic

TARGET = Path(__file__).parent / "results" / "data" / "matmul-stages.json"
ARCH = 90


def record() -> dict[str, Any]:
    compiler = nvcc()
    assert compiler, "the steps in CUDA C++ need nvcc"
    release = re.search(r"release ([\d.]+)", subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout)
    header = benchmark_record.header("matmul-stages")
    return header | {
        "command": "strata kernels stages matmul",
        "note": f"For sm_{ARCH}, by Triton {header['versions']['triton']} and nvcc {release[1] if release else ''}.",
        "kernels": [
            {"step": name.removesuffix("_kernel")} | {key: value for key, value in as_json(found).items() if key != "seconds"}
            for name, one in compilations("matmul", Variant(ARCH)).items()
            for found in [compile_stages(one, ARCH)]
        ],
    }


if __name__ == "__main__":
    write_atomic(TARGET, json.dumps(record(), indent=2) + "\n")
    print(f"written: {TARGET}")
