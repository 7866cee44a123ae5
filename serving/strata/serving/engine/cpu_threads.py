"""vLLM's CPU worker, with one thread in steps of little work.

All threads of a kernel wait for the slowest. In a small model's step a kernel takes less time than a core needs to get back to a
thread, so threads on the cores that the gateway and the clients use make such a step take twice as long.

Chosen by vLLM's argument `worker_cls`. Imports vLLM: only engine processes import this file.
"""

from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

# Multiply-adds of a kernel from which all threads are used: about 200 µs of one core.
WORTH_ALL = 4_000_000
# Reading a weight from memory takes as long as this many multiply-adds.
READ = 8

# vLLM replaces `torch.set_num_threads` by a function without effect, since its own workers bind their threads to cores.
_set_threads = torch._C.set_num_threads


class Worker(CPUWorker):  # type: ignore[misc]
    _all: int
    _now: int
    _weights: float  # of a layer's kernel on average
    _width: int  # of the queries of all heads

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._all = self._now = torch.get_num_threads()
        matrices = [each.numel() for each in self.get_model().parameters() if each.dim() > 1]
        self._weights = sum(matrices) / max(1, len(matrices))
        config = self.model_config
        self._width = config.get_num_attention_heads(self.parallel_config) * config.get_head_size()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        threads = self._all if self._work(scheduler_output) >= WORTH_ALL else 1
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
