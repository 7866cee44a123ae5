"""vLLM's CPU worker, with one thread in steps of little work, and with kernels for norms (`cpu_norms.py`).

All threads of a kernel wait for the slowest. In a small model's step a kernel takes less time than a core needs to get back to a
thread, so threads on the cores that the gateway and the clients use make such a step take twice as long.

Chosen by vLLM's argument `worker_cls`. Imports vLLM: only engine processes import this file.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from strata.serving.engine import cpu_norms

# Multiply-adds of a kernel from which all threads are used: about 200 µs of one core.
WORTH_ALL = 4_000_000
# Reading a weight from memory takes as long as this many multiply-adds.
READ = 8

# vLLM replaces `torch.set_num_threads` by a function without effect, since its own workers bind their threads to cores.
_set_threads = torch._C.set_num_threads


class Worker(CPUWorker):  # type: ignore[misc]
    _all: int
    _now: int
    _weights: float  # that a token is multiplied with in a kernel, on average
    _width: int  # of the queries of all heads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cpu_norms.use()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._all = self._now = torch.get_num_threads()
        self._weights = weights_per_kernel(self.get_model())
        config = self.model_config
        self._width = config.get_num_attention_heads(self.parallel_config) * config.get_head_size()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self._all == 1:
            return super().execute_model(scheduler_output)
        pictures = bool(scheduler_output.scheduled_encoder_inputs)  # their patches outnumber the tokens that stand for them
        threads = self._all if pictures or self._work(scheduler_output) >= WORTH_ALL else 1
        if threads != self._now:
            _set_threads(threads)
            self._now = threads
        return super().execute_model(scheduler_output)

    def _work(self, step: SchedulerOutput) -> float:
        """Multiply-adds of the step's larger kernels: a layer's weights, or its attention."""
        tokens, cached = step.num_scheduled_tokens, step.scheduled_cached_reqs
        contexts = [(each.req_id, each.num_computed_tokens) for each in step.scheduled_new_reqs]
        contexts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        pairs: int = sum(tokens[request] * (before + tokens[request]) for request, before in contexts)
        scheduled: int = step.total_num_scheduled_tokens
        return max(self._weights * (scheduled + READ), 2.0 * self._width * pairs)


def weights_per_kernel(model: torch.nn.Module) -> float:
    """Weights that a token is multiplied with in a linear layer, or in all of its experts at once.

    Told by the layers' sizes: the parameters themselves are gone once vLLM has packed them for its kernels.
    """
    kernels: list[int] = [each.input_size * each.output_size for each in model.modules() if isinstance(each, LinearBase)]
    experts = [each for each in model.modules() if isinstance(each, RoutedExperts)]
    kernels += [each.top_k * 3 * each.hidden_size * each.intermediate_size_per_partition for each in experts]
    return sum(kernels) / max(1, len(kernels))
