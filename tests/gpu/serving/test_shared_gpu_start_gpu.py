"""Engines that share a GPU and start at the same time."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from strata.platform import recipe_file
from strata.serving.bench.contenders import dummy_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL = "model={layers: 4, hidden: 512, heads: 8, kv_heads: 8, ffn: 1024, vocab: 1024, context: 512}"
ENGINE = """
import sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    began = time.time()
    worker = "strata.serving.gpu_sharing.worker.Worker"
    llm = LLM(model=sys.argv[1], worker_cls=worker, gpu_memory_utilization=float(sys.argv[2]), max_num_seqs=int(sys.argv[3]))
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    tokens = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    print("RESULT", blocks, began, time.time(), *tokens[0].outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "dummy"
    dummy_model.write(folder, recipe_file.load("h200", [SMALL]))
    return folder


@dataclass(frozen=True)
class Engine:
    process: subprocess.Popen[bytes]
    log: Path

    def result(self) -> list[str]:
        """KV blocks, times of its begin and end, tokens."""
        try:
            code = self.process.wait(timeout=280)
        finally:
            self.process.kill()
        out = self.log.read_text()
        assert code == 0, out[-4000:]
        return next(line for line in out.splitlines() if line.startswith("RESULT")).split()[1:]


def started(folder: Path, model: Path, share: float, sequences: int = 16) -> Engine:
    script = folder / "engine.py"
    script.write_text(ENGINE)
    environment = os.environ | {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    command = [sys.executable, str(script), str(model), str(share), str(sequences)]
    log = folder / f"{len(list(folder.iterdir()))}.log"
    with log.open("wb") as output:
        return Engine(subprocess.Popen(command, env=environment, stdout=output, stderr=output), log)


def test_two_engines_start_at_once_and_the_size_is_recorded(model: Path, tmp_path: Path) -> None:
    """Same tokens and, within a percent, the same KV cache from engines with the same settings; then from a record."""
    engines = [started(tmp_path, model, 0.3), started(tmp_path, model, 0.3)]
    pair = [engine.result() for engine in engines]
    (first, began, ended, *tokens), (second, began_too, ended_too, *tokens_too) = pair
    assert max(float(began), float(began_too)) < min(float(ended), float(ended_too)), "one after the other"
    assert tokens == tokens_too and abs(int(first) - int(second)) <= 0.01 * int(first)
    again = started(tmp_path, model, 0.3).result()
    assert int(again[0]) in (int(first), int(second)) and again[3:] == tokens


def test_third_engine_harms_neither_of_two(model: Path, tmp_path: Path) -> None:
    pair = [started(tmp_path, model, 0.45), started(tmp_path, model, 0.45, sequences=8)]
    third = started(tmp_path, model, 0.45)
    results = [engine.result() for engine in pair]
    assert len({tuple(words[3:]) for words in results}) == 1
    assert third.process.wait(timeout=280) in (0, 1)  # refused, or started after the others had ended
