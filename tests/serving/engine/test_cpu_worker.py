"""Threads of a CPU engine's steps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from strata.platform import recipe_file
from strata.serving.engine import cpu_norms, cpu_worker
from strata.serving.spec import CPU_WORKER
from strata.training.checkpoint.export import write_folder
from strata.training.model.llama import Llama

LAPTOP = [(128, 256), (128, 128), (128, 768), (384, 128)] * 2  # inputs and outputs of the linear layers
WIDE = [(512, 1024), (512, 512), (512, 3072), (1536, 512)] * 2


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that torch is given."""
    given: list[int] = []
    monkeypatch.setattr(cpu_worker, "_set_threads", given.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(CPUWorker, "load_model", lambda self: None)
    monkeypatch.setattr(CPUWorker, "execute_model", lambda self, step: step)
    return given


def worker(shapes: list[tuple[int, int]], heads: int = 4, head: int = 32) -> Any:
    made: Any = cpu_worker.Worker.__new__(cpu_worker.Worker)
    made.parallel_config = None
    made.model_config = SimpleNamespace(get_num_attention_heads=lambda parallel: heads, get_head_size=lambda: head)
    made.model_runner = SimpleNamespace(get_model=lambda: torch.nn.ModuleList(linear(*shape) for shape in shapes))
    made.load_model()
    return made


def linear(inputs: int, outputs: int) -> LinearBase:
    """A layer as vLLM leaves it: with its sizes, and without the weights that its kernel has packed."""
    made = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(made)
    made.input_size, made.output_size = inputs, outputs
    made.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    return made


def step(prompts: dict[str, int], streams: dict[str, int], cached: int = 0) -> SchedulerOutput:
    """A step of prompts, each with `cached` tokens in the KV cache, and of streams with the given number of tokens so far."""
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs = [SimpleNamespace(req_id=name, num_computed_tokens=cached) for name in prompts]  # type: ignore[misc]
    made.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(streams),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[],
        num_computed_tokens=list(streams.values()),
        num_output_tokens=[],
    )
    made.num_scheduled_tokens = prompts | dict.fromkeys(streams, 1)
    made.total_num_scheduled_tokens = sum(made.num_scheduled_tokens.values())
    return made


def streams(number: int, context: int) -> dict[str, int]:
    return {f"stream {each}": context for each in range(number)}


@pytest.mark.parametrize(
    ("shapes", "prompts", "others", "wanted"),
    [
        (LAPTOP, {}, streams(1, 100), 1),
        (LAPTOP, {}, streams(16, 200), 1),
        (LAPTOP, {"short": 24}, streams(15, 200), 1),
        (LAPTOP, {"long": 128}, {}, 8),
        (LAPTOP, {"long": 128}, streams(16, 200), 8),
        (LAPTOP, {}, {}, 1),
        (LAPTOP, {}, streams(1, 30_000), 8),  # attention reads 30,000 tokens
        (WIDE, {}, streams(1, 100), 8),
    ],
)
def test_small_steps_have_one_thread(
    threads: list[int], shapes: list[tuple[int, int]], prompts: dict[str, int], others: dict[str, int], wanted: int
) -> None:
    worker(shapes).execute_model(step(prompts, others))
    assert (threads or [8])[-1] == wanted


def test_cached_tokens_of_a_prompt_count_in_its_attention(threads: list[int]) -> None:
    small = worker(LAPTOP)
    small.execute_model(step({"prompt": 8}, {}))
    assert threads == [1]
    small.execute_model(step({"prompt": 8}, {}, cached=4000))
    assert threads == [1, 8]


def test_threads_change_only_when_they_must(threads: list[int]) -> None:
    small = worker(LAPTOP)
    for _ in range(3):
        small.execute_model(step({}, streams(2, 100)))
    small.execute_model(step({"long": 200}, {}))
    given = step({"long": 200}, {})
    assert small.execute_model(given) is given
    assert threads == [1, 8]


def test_steps_with_pictures_have_all_threads(threads: list[int]) -> None:
    small = worker(LAPTOP)
    given = step({"short": 24}, {})
    small.execute_model(given)
    given.scheduled_encoder_inputs = {"short": [0]}
    small.execute_model(given)
    assert threads == [1, 8]


def test_a_model_without_linear_layers_is_served(threads: list[int]) -> None:
    worker([]).execute_model(step({}, streams(1, 0)))
    assert threads == [1]


# A real engine: the sizes that vLLM's layers have after loading, the threads of its steps, and its tokens.
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.ir.ops import fused_add_rms_norm, rms_norm
from strata.serving.engine import cpu_worker
folder, settings, prompt, new, answer = json.loads(sys.argv[1])
given, set_threads = [], cpu_worker._set_threads
cpu_worker._set_threads = lambda number: (given.append(number), set_threads(number))
engine = LLM(folder, skip_tokenizer_init=True, distributed_executor_backend="uni", **settings)
worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
given.clear()
greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
outputs = [engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0] for _ in range(2)]
tokens = [list(output.outputs[0].token_ids) for output in outputs]
norms = [operator.get_priority()[0] for operator in (rms_norm, fused_add_rms_norm)]
json.dump([worker._weights, given, tokens, norms], open(answer, "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("laptop", (128 * 256 + 128 * 128 + 128 * 768 + 384 * 128) / 4),
        pytest.param("laptop-moe", (128 * 256 + 128 * 128 + 128 * 8 + 2 * 3 * 128 * 192) / 4, marks=pytest.mark.rotation),
    ],
)
def test_real_engines_change_their_threads_and_not_their_tokens(recipe: str, weights: float, tmp_path: Path) -> None:
    section, new = recipe_file.load(recipe).model, 8
    prompt = [1 + (7 * number) % 500 for number in range(200)]  # without the token of padding, which transformers masks
    write_folder(tmp_path, Llama(section).state_dict(), section, torch.float32)
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "enable_prefix_caching": False}
    words = json.dumps([str(tmp_path), settings | {"worker_cls": CPU_WORKER}, prompt, new, str(tmp_path / "answer")])
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, words], env=os.environ | own, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, given, tokens, norms = json.loads((tmp_path / "answer").read_text())
    assert found == weights and norms == ([cpu_norms.NAME] * 2 if cpu_norms.BUILT else ["native"] * 2)
    assert given[-3:] == [1, 2, 1], "the prompt is computed by all threads, and tokens are decoded by one"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)[0, len(prompt) :]
    assert tokens == [expected.tolist()] * 2
