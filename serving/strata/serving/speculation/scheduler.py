"""vLLM's schedulers with the policy of `policy.py`, and with requests that are not drafted for.

vLLM's own seam is a table of drafted tokens by batch size (`num_speculative_tokens_per_batch_size`), fixed at the start. Here the
table answers by the measured rates.

Imports vLLM: only engine processes import this file.
"""

import time
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from strata.serving.speculation.cpu_drafter import CpuDrafter
from strata.serving.speculation.policy import Policy
from strata.serving.speculation.settings import OFF


class Table:
    """Drafted tokens by batch size."""

    def __init__(self, tokens: int, policy: Policy) -> None:
        self._tokens, self._policy = tokens, policy

    def __getitem__(self, streams: int) -> int:
        return self._tokens if self._policy.of(streams).drafts else 0


class _Measured(Scheduler):  # type: ignore[misc]
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._policy = Policy()
        self.dynamic_sd_lookup = Table(self.num_spec_tokens, self._policy)
        self._ended_at: float | None = None  # the last step, if it left requests
        if vllm_config.speculative_config.method == "ngram":
            compile_lookup(vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        step: SchedulerOutput = super().schedule(*args, **kwargs)
        if CpuDrafter.latest is not None:
            CpuDrafter.latest.wanted = step.num_spec_tokens_to_schedule
        return step

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now, began = time.monotonic(), self._ended_at
        if began is not None and only_decodes(scheduler_output):
            tokens = sum(map(len, model_runner_output.sampled_token_ids))
            streams = len(scheduler_output.num_scheduled_tokens)
            self._policy.of(streams).add(scheduler_output.num_spec_tokens_to_schedule > 0, tokens, now - began)
        self._ended_at = now if self.running else None
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        self._drop(draft_token_ids.req_ids)

    def _drop(self, names: Any) -> None:
        """Drops the drafts of requests that have speculation switched off."""
        for name in names:
            request = self.requests.get(name)
            if request is not None and request.spec_token_ids and is_off(request):
                request.spec_token_ids = []


def compile_lookup(config: VllmConfig) -> None:
    """Compiles the search for n-grams, which vLLM does in the first step, while every stream waits. The worker of an engine on
    one device runs in this process."""
    proposer, length = NgramProposer(config), config.model_config.max_model_len
    proposer.propose(1, [[0]], np.ones(1, np.int32), np.zeros((1, length), np.int32))


def only_decodes(step: SchedulerOutput) -> bool:
    """True if every sequence of a step has one token and its drafts. Steps that prefill say nothing about drafts."""
    if step.scheduled_new_reqs or not step.num_scheduled_tokens:
        return False
    drafts = step.scheduled_spec_decode_tokens
    return all(count == 1 + len(drafts.get(name, ())) for name, count in step.num_scheduled_tokens.items())


def is_off(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and bool((params.extra_args or {}).get(OFF))


class MeasuredScheduler(_Measured):
    pass


class MeasuredAsyncScheduler(_Measured, AsyncScheduler):  # type: ignore[misc]
    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        self._drop(scheduler_output.num_scheduled_tokens)
