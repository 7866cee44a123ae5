"""vLLM's schedulers with a log of their steps, which names the requests: vLLM's own ranges only count them.

Imports vLLM: only engine processes import this file.
"""

import json
import time
from pathlib import Path
from typing import Any, TextIO

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from strata.platform.profile.processor_wait import ProcessorWait
from strata.serving.engine.profiled import LOG


class _Recorded(Scheduler):  # type: ignore[misc]
    """Writes one line per arrival and per call. Times are Unix times in nanoseconds, as in the traces."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        path = Path(vllm_config.profiler_config.torch_profiler_dir) / LOG
        self._log: TextIO | None = path.open("a", buffering=1)
        self._wait = ProcessorWait()  # of the engine's thread
        self._idle: tuple[int, int] | None = None  # waiting requests and those without their KV blocks, of the last empty step

    def add_request(self, request: Request) -> None:
        self._write({"arrived": request.request_id, "prompt": request.num_prompt_tokens, "begin": time.time_ns()})
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begin = time.time_ns()
        output = super().schedule(*args, **kwargs)
        end = time.time_ns()
        waiting = [*self.waiting, *self.skipped_waiting]
        remote = sum(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in waiting)
        idle = None if output.num_scheduled_tokens else (len(waiting), remote)
        if idle is None or idle != self._idle:  # an engine that waits for KV blocks schedules empty steps all the time
            self._write(
                {
                    "scheduled": dict(output.num_scheduled_tokens),
                    "waiting": len(waiting),
                    "remote": remote,
                    "preempted": sorted(output.preempted_req_ids or ()),
                    "kv": self.kv_cache_manager.usage,
                    "delayed": self._wait.seconds(),
                    "begin": begin,
                    "end": end,
                }
            )
        self._idle = idle
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        begin, before = time.time_ns(), set(self.finished_req_ids)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_scheduled_tokens:
            self._write({"finished": sorted(self.finished_req_ids - before), "begin": begin, "end": time.time_ns()})
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Ends requests that were cancelled, or whose client is gone."""
        begin, before = time.time_ns(), set(self.finished_req_ids)
        result = super().finish_requests(*args, **kwargs)
        self._write({"cancelled": sorted(self.finished_req_ids - before), "begin": begin, "end": time.time_ns()})
        return result

    def _write(self, entry: dict[str, Any]) -> None:
        """A disk that is full loses the rest of the log, not the engine."""
        if self._log is None:
            return
        try:
            self._log.write(json.dumps(entry) + "\n")
        except OSError:
            self._log = None


class RecordedScheduler(_Recorded):
    pass


class RecordedAsyncScheduler(_Recorded, AsyncScheduler):  # type: ignore[misc]
    pass
