"""`strata kernels stages`: compiler output of the kernels, for GPUs that are not present.

The other tests run kernels in Triton's interpreter, which compiles nothing. The command therefore runs in one separate process
for all tests of this module.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import STRATA

pytestmark = pytest.mark.slow

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

MANY = """
import json
from pathlib import Path
from strata.kernels.commands import kernels_stages
from strata.platform.errors import UserError
folder = Path({folder!r})
kernels_stages("rms_norm", against="sm_80,num_warps=16", out=folder / "rms_norm")
kernels_stages("rope", arch="sm_100", out=folder / "rope")
kernels_stages("swiglu", kernel="swiglu_kernel", stage="ptx", out=folder / "swiglu")
kernels_stages("flash_attention", out=folder / "flash_attention")
kernels_stages("paged_attention", out=folder / "paged_attention")
kernels_stages("kv_cache_write", arch="sm_80", out=folder / "kv_cache_write")
kernels_stages("linear_cross_entropy", out=folder / "linear_cross_entropy")
kernels_stages("sample", out=folder / "sample")
refusals = []
for words in {wrong!r}:
    try:
        kernels_stages(**words)
    except UserError as error:
        refusals.append([error.cause, error.fix])
(folder / "refusals.json").write_text(json.dumps(refusals))
"""

# Arguments, expected part of the error, expected part of the fix.
WRONG: list[tuple[dict[str, str], str, str]] = [
    ({"op": "swiglu", "arch": "sm_70"}, "'sm_70'", "sm_80, sm_90, sm_100"),
    ({"op": "swiglu", "kernel": "softmax_kernel"}, "no kernel 'softmax_kernel'", "swiglu_kernel"),
    ({"op": "swiglu", "config": "TILE=3"}, "setting TILE", "num_warps"),
    ({"op": "swiglu", "config": "BLOCK"}, "'BLOCK' is not a setting", "NAME=NUMBER"),
    ({"op": "swiglu", "stage": "cubin"}, "no stage 'cubin'", "sass"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, triton_cache: Path) -> Path:
    """Folder with the stages of many kernels, written by one process; its output is in `out`."""
    folder = tmp_path_factory.mktemp("stages")
    done = subprocess.run(
        [sys.executable, "-c", MANY.format(folder=str(folder), wrong=[words for words, _, _ in WRONG])],
        env=ENVIRONMENT | {"TRITON_CACHE_DIR": str(triton_cache)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "out").write_text(done.stdout)
    return folder


def facts(folder: Path, op: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / op / "summary.json").read_text())
    return found


def test_every_stage_is_printed_and_written(folder: Path) -> None:
    printed = (folder / "out").read_text()
    for title in ("Triton IR", "GPU IR", "LLVM IR", "PTX", "SASS"):
        assert f"\n{title}, " in printed
    [stem] = [path.stem for path in (folder / "rms_norm").glob("rms_norm_kernel-sm_90*.ptx")]
    starts = {"ttir": "tt.func", "ttgir": "ttg.num-warps", "llir": "define ptx_kernel", "ptx": ".target sm_90a", "sass": "EXIT"}
    for stage, mark in starts.items():
        assert mark in (folder / "rms_norm" / f"{stem}.{stage}").read_text()


def test_one_stage_is_printed_in_full(folder: Path) -> None:
    [ptx] = (folder / "swiglu").glob("*.ptx")
    assert ptx.read_text().strip() in (folder / "out").read_text()


def test_two_variants_are_side_by_side(folder: Path) -> None:
    one, other = (line for line in facts(folder, "rms_norm") if line["kernel"] == "rms_norm_kernel")
    assert (one["arch"], other["arch"]) == (90, 80)
    assert other["warps"] == 16 != one["warps"]
    assert other["registers"] < one["registers"]  # the same row over more threads
    assert any("sm_90 as launched" in line and "sm_80 num_warps=16" in line for line in (folder / "out").read_text().splitlines())


def test_memory_bound_kernels_use_the_widest_accesses(folder: Path) -> None:
    for op in ("rms_norm", "rope", "swiglu"):
        for kernel in facts(folder, op):
            assert kernel["stack"] == kernel["spilled"] == 0, kernel
            few = kernel["arch"] == 80  # rms_norm with 16 warps, four values per thread
            if "sum_partials" not in kernel["kernel"] and not few:
                assert kernel["wide"] + kernel["async_copies"] >= 2, kernel


def test_hopper_attention_uses_wgmma_and_tma_and_does_not_spill(folder: Path) -> None:
    kernels = facts(folder, "flash_attention")
    assert all(kernel["stack"] == kernel["spilled"] == 0 for kernel in kernels), kernels
    products = [kernel for kernel in kernels if any(kernel["tensor_cores"].values())]
    assert len(products) >= 2  # forward and backward
    for kernel in products:
        assert kernel["tensor_cores"]["wgmma"] and kernel["tma"]["loads"], kernel
        assert not kernel["tensor_cores"]["mma.sync"], kernel


def test_serving_kernels_do_not_spill(folder: Path) -> None:
    for op in ("paged_attention", "kv_cache_write"):
        assert all(kernel["stack"] == kernel["spilled"] == 0 for kernel in facts(folder, op)), facts(folder, op)
    assert any(any(kernel["tensor_cores"].values()) for kernel in facts(folder, "paged_attention"))


def test_two_programs_of_sample_fit_a_multiprocessor(folder: Path) -> None:
    kernels = {kernel["kernel"]: kernel for kernel in facts(folder, "sample")}
    assert all(kernel["spilled"] == 0 for kernel in kernels.values()), kernels
    assert kernels["summarize_kernel"]["wide"] >= 16  # lines of a tile, each read by 16 bytes of a thread
    assert kernels["select_kernel"]["registers"] * kernels["select_kernel"]["warps"] * 32 <= 65536 // 2


def test_summary_counts_match_the_machine_code(folder: Path) -> None:
    for kernel in facts(folder, "rms_norm"):
        [sass] = (folder / "rms_norm").glob(f"{kernel['kernel'].replace(': ', '-').replace(' ', '-')}-sm_{kernel['arch']}*.sass")
        text = sass.read_text()
        assert text.count("LDGSTS") == kernel["async_copies"]
        assert text.count("HGMMA") == kernel["tensor_cores"]["wgmma"] == 0
        assert kernel["instructions"] > 20 and 0 < kernel["registers"] <= 255 and kernel["seconds"] > 0


def test_invalid_options_are_rejected_with_the_valid_values(folder: Path) -> None:
    refusals = json.loads((folder / "refusals.json").read_text())
    for (_, cause, fix), (actual_cause, actual_fix) in zip(WRONG, refusals, strict=True):
        assert cause in actual_cause and fix in actual_fix


@pytest.mark.parametrize(
    ("words", "interpret", "message"), [("softmax", "0", "no operation 'softmax'"), ("swiglu", "1", "Unset it")]
)
def test_command_error_has_no_traceback(words: str, interpret: str, message: str) -> None:
    environment = ENVIRONMENT | {"TRITON_INTERPRET": interpret}
    done = subprocess.run([STRATA, "kernels", "stages", words], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
