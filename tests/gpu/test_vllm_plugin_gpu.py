"""vLLM engine with Strata's kernels and CUDA graphs on one GPU: the same tokens as stock vLLM."""

import random
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from strata.kernels import vllm_plugin
from strata.platform import recipe_file

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("vllm")

LENGTHS = (3, 17, 129, 600)
KERNELS = ("decode_kernel", "merge_kernel", "prefill_kernel", "kv_cache_write_kernel", "forward")
SHAPE = ("model.layers=2", "model.hidden=512", "model.heads=8", "model.kv_heads=2", "model.ffn=1024", "model.vocab=2048")


def test_answers_equal_stock_vllm(tmp_path: Path) -> None:
    from strata.kernels.bench.vllm_engine import start, write_model
    from strata.kernels.bench.vllm_plugin import distances, divergences

    if "strata_kernels" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        pytest.skip("needs Strata installed: vLLM finds the plugin by its entry point")
    model = recipe_file.load("h200", [*SHAPE, "model.context=2048"]).model
    write_model(tmp_path / "model", model)
    draw = random.Random(1)
    prompts = [draw.choices(range(model.vocab), k=length) for length in LENGTHS]
    small = {"max_model_len": 2048, "max_num_seqs": 256, "kv_cache_memory_bytes": 2**28}
    with ExitStack() as stack:
        plain = start("vllm", tmp_path, (), small)
        stack.callback(plain.close)
        ours = start("strata", tmp_path, vllm_plugin.PARTS, small)
        stack.callback(ours.close)
        for engine in (plain, ours):
            engine.wait_until_up()
        assert ours.log_lines("Using AttentionBackendEnum.CUSTOM backend") and not plain.log_lines("AttentionBackendEnum.CUSTOM")
        assert ours.log_lines("Graph capturing finished")
        theirs = plain.answer(prompts, 16)
        together, one_after_the_other = ours.answer(prompts, 16), ours.answer(prompts, 16, concurrency=2)
        late = ours.log_lines("JIT compilation during inference")
    for answers in (together, one_after_the_other):
        found = divergences(theirs, answers, LENGTHS)
        assert all(divergence.within_tolerance for divergence in found), found
        assert max(distances(theirs, answers)) < 0.25
    assert not [line for line in late if any(kernel in line for kernel in KERNELS)], late
