"""docs/kernel-ladder.md: excerpts from the sources, the picture, and the recorded stages."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from docgen import ladder, record, results

from strata.kernels.ladder.steps import STEPS

PAGE = results.ROOT / "docs" / "kernel-ladder.md"
SOURCE = """\
int other() { return 1; }

extern "C" void kernel(
    int a, int b
) {
    for (int k = 0; k < a; k++) {
        b += k;

        b *= 2;
    }
    return;
}

int last() { return 2; }
"""


def test_an_excerpt_is_the_block_that_begins_with_its_text(tmp_path: Path) -> None:
    path = tmp_path / "x.cu"
    path.write_text(SOURCE)
    assert ladder.excerpt(path, "for (int k").splitlines() == [
        "for (int k = 0; k < a; k++) {", "    b += k;", "", "    b *= 2;", "}"
    ]  # fmt: skip
    whole = ladder.excerpt(path, 'extern "C"')
    assert whole.startswith('extern "C" void kernel(') and whole.endswith("    return;\n}")
    assert ladder.excerpt(path, "int last") == "int last() { return 2; }"
    with pytest.raises(ValueError, match="no line with 'gone'"):
        ladder.excerpt(path, "gone")


def test_excerpts_follow_their_source() -> None:
    page = ladder.fill(PAGE.read_text())
    assert ladder.fill(page) == page
    marks = ladder.CODE.findall(page)
    assert len(marks) == page.count("<!-- code: ")
    stale = page.replace("total = tl.dot(left, right, total)", "total += tl.dot(left, right)", 1)
    assert stale != page and ladder.fill(stale) == page
    shown = {Path(path).stem for _, path, _, _ in marks}
    assert shown == {step.name for step in STEPS}, "a step without an excerpt"


def test_every_step_has_a_section() -> None:
    titles = re.findall(r"^### \d+\. `(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert titles == [step.name for step in STEPS]


def run() -> record.Run:
    steps = {
        step.name: {
            "language": step.language,
            "intensity": step.intensity,
            "ms": 1.0,
            "tflops": 2.0**number,
            "of_cublas": 0.01 * number,
        }
        for number, step in enumerate(STEPS)
    }
    steps["dot"] |= {"ms": None, "tflops": None, "of_cublas": None}
    steps["cuBLAS"] = {"ms": 1.0, "tflops": 700.0, "of_cublas": 1.0}
    return {"copy_bytes_per_s": 4e12, "cases": [{"rows": 64, "columns": 64, "inner": 64, "steps": steps}]}


def test_the_picture_has_every_measured_step() -> None:
    svg = ladder.picture(run())
    ElementTree.fromstring(svg)
    texts = re.findall(r">([^<>]+)</text>", svg)
    assert {"1 naive", "7 pipelined", "10 warp_specialized", "10.0%", "cuBLAS, 700 TFLOP/s", "memory, 4.0 TB/s"} <= set(texts)
    assert not any("dot" in text and "no_dot" not in text for text in texts), "dot was not measured"
    assert ladder.picture(run()) == svg, "a picture that changes without its data is never fresh"


@pytest.mark.slow
def test_the_picture_is_fresh() -> None:
    for path, text in results.pictures().items():
        assert path.read_text() == text, f"run 'make docs': {path}"


COMPILED = ("dot", "tma_persistent", "warp_specialized")
COMPILE = """
import json, sys
from strata.kernels.compiler.show import Variant, compilations
from strata.kernels.compiler.stages import compile_stages
from strata.kernels.compiler.view import as_json

found = compilations("matmul", Variant(90))
print(json.dumps({name: as_json(compile_stages(found[name + "_kernel"], 90)) for name in sys.argv[1:]}))
"""


@pytest.mark.rotation
def test_recorded_stages_are_those_of_the_sources(triton_cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(triton_cache)
    command = [sys.executable, "-c", COMPILE, *COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    recorded = {kernel["step"]: kernel for kernel in results.load("matmul-stages")["kernels"]}
    assert list(recorded) == [step.name for step in STEPS]
    for name, kernel in json.loads(done.stdout.splitlines()[-1]).items():
        assert kernel["stack"] == kernel["spilled"] == 0 and kernel["shared"] <= 232_448, kernel
        differing = [key for key, value in kernel.items() if key != "seconds" and recorded[name][key] != value]
        assert not differing, f"run 'make ladder docs': {name}, {differing}"


def test_products_of_the_page_are_right() -> None:
    """Figures of the prose that follow from the sizes alone."""
    text = PAGE.read_text()
    assert "2 x 8192³ = 1.1 TFLOP" in text and round(2 * 8192**3 / 1e12, 1) == 1.1
    by_name = {step.name: step for step in STEPS}
    assert "85 operations per byte read instead of 32" in text
    assert (math.floor(by_name["pipelined"].intensity), by_name["dot"].intensity) == (85, 32)
