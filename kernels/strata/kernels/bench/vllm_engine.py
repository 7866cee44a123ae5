"""vLLM's offline engine in a subprocess, on a model with random weights. Several engines can run side by side."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from strata.kernels import vllm_plugin
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection

KV_CACHE_GIB = 8
TOP = 5
TIMEOUT_S = 170.0  # for a start, or an answer


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    rated: list[dict[int, float]]  # for each token, the log-probabilities of the top tokens


class Engine:
    """Client of the subprocess, which reads requests from its standard input and replies on a pipe."""

    def __init__(self, name: str, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        answers, reply_to = os.pipe()
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | environment
        command = [sys.executable, "-m", "strata.kernels.bench.vllm_engine", json.dumps(arguments), str(reply_to)]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[reply_to],
                text=True,
                start_new_session=True,
            )
        os.close(reply_to)
        self._answers = os.fdopen(answers)

    def wait_until_up(self) -> float:
        return float(self._answer()["seconds"])

    def answer(self, prompts: Sequence[list[int]], tokens: int, concurrency: int | None = None) -> list[Answer]:
        reply = self._request(prompts, [tokens] * len(prompts), concurrency, TOP)
        rated = [[{int(token): rate for token, rate in place.items()} for place in answer] for answer in reply["rated"]]
        return [Answer(tokens, rates) for tokens, rates in zip(reply["tokens"], rated, strict=True)]

    def seconds(self, prompts: Sequence[list[int]], tokens: Sequence[int], concurrency: int | None = None) -> float:
        """Time to generate answers of these lengths. Prompts start together, or with a limit as earlier answers finish."""
        return float(self._request(prompts, tokens, concurrency, None)["seconds"])

    def log_lines(self, *words: str) -> list[str]:
        """Lines of the log that contain one of the words."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if any(word in line for word in words)]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # vLLM's own processes too
        self._process.wait()
        self._answers.close()

    def _request(
        self, prompts: Sequence[list[int]], tokens: Sequence[int], concurrency: int | None, top: int | None
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"prompts": prompts, "tokens": tokens, "concurrency": concurrency or len(prompts), "top": top}
        with suppress(BrokenPipeError):  # the process exited: its log has the reason
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answers, _, _ = select.select([self._answers], [], [], TIMEOUT_S)
        line = self._answers.readline() if answers else ""
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])
            how = "ended" if answers else f"did not answer within {TIMEOUT_S:.0f} s"
            raise UserError(f"{tail}\nThe engine '{self.name}' {how}.", "See its log above.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(name: str, folder: Path, parts: Sequence[str], arguments: dict[str, Any] | None = None) -> Engine:
    """Starts an engine on the model in `folder` with these parts of the plugin; without parts, stock vLLM. Each engine has its
    own cache folder, because engines that start concurrently would write the same files."""
    wanted: dict[str, Any] = {
        "model": str(folder / "model"),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        # Set explicitly: engines that profile free memory while others start would measure each other.
        "kv_cache_memory_bytes": KV_CACHE_GIB * 2**30,
        "gpu_memory_utilization": 0.1,
        **(arguments or {}),
    }
    environment = {"VLLM_CACHE_ROOT": str(folder / name / "cache"), vllm_plugin.SWITCH: ""}
    (folder / name).mkdir()
    if parts:
        wanted |= vllm_plugin.engine_arguments(parts)
        environment |= vllm_plugin.environment(parts)
    return Engine(name, wanted, environment, folder / name / "log")


def serve(arguments: dict[str, Any], reply_to: int) -> None:
    """Main function of the subprocess. vLLM writes to both stdout and stderr, so replies use a pipe of their own."""
    began = time.perf_counter()
    from vllm import LLM

    llm = LLM(**arguments)
    with os.fdopen(reply_to, "w", buffering=1) as replies:
        print(json.dumps({"seconds": time.perf_counter() - began}), file=replies)
        for line in sys.stdin:
            request = json.loads(line)
            began = time.perf_counter()
            answers = generate(llm, **request)
            reply: dict[str, Any] = {"seconds": time.perf_counter() - began}
            if request["top"] is not None:
                reply["tokens"] = [list(answer.token_ids) for answer in answers]
                reply["rated"] = [
                    [{token: rating.logprob for token, rating in place.items()} for place in answer.logprobs]
                    for answer in answers
                ]
            print(json.dumps(reply), file=replies)


def generate(llm: Any, prompts: list[list[int]], tokens: list[int], concurrency: int, top: int | None) -> list[Any]:
    """Like LLM.generate, but starts prompts as earlier answers finish."""
    from vllm import SamplingParams

    requests = [
        (
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=top),
        )
        for prompt, length in zip(prompts, tokens, strict=True)
    ]
    waiting = iter(requests)
    ended: list[Any] = []
    while len(ended) < len(requests):
        under_way = llm.llm_engine.get_num_unfinished_requests()
        for prompt, sampling in islice(waiting, concurrency - under_way):
            llm.enqueue(prompt, sampling, use_tqdm=False)
        ended += [output for output in llm.llm_engine.step() if output.finished]
    return [output.outputs[0] for output in sorted(ended, key=lambda output: int(output.request_id))]


def write_model(folder: Path, model: ModelSection, seed: int = 0) -> None:
    """Random weights, with queries large enough that attention selects a few keys. With smaller queries, attention averages over
    all keys and hardly distinguishes prompts."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator(device).manual_seed(seed)

    def random_weights(rows: int, columns: int, std: float = 0.02) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw, device=device) * std).bfloat16().cpu()

    ones, keys = torch.ones(model.hidden, dtype=torch.bfloat16), model.kv_heads * model.head_dim
    tensors = {"model.embed_tokens.weight": random_weights(model.vocab, model.hidden), "model.norm.weight": ones}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": random_weights(model.hidden, model.hidden, std=0.06),
            f"{at}.self_attn.k_proj.weight": random_weights(keys, model.hidden),
            f"{at}.self_attn.v_proj.weight": random_weights(keys, model.hidden),
            f"{at}.self_attn.o_proj.weight": random_weights(model.hidden, model.hidden),
            f"{at}.mlp.gate_proj.weight": random_weights(model.ffn, model.hidden),
            f"{at}.mlp.up_proj.weight": random_weights(model.ffn, model.hidden),
            f"{at}.mlp.down_proj.weight": random_weights(model.hidden, model.ffn),
            f"{at}.input_layernorm.weight": ones.clone(),
            f"{at}.post_attention_layernorm.weight": ones.clone(),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), int(sys.argv[2]))
