"""Ray Train's side of a run, followed from the driver.

Ray's `fit` blocks and, on the main thread, takes Ctrl-C to abort the workers; so it runs on a thread of its own, while the
main thread shows progress and turns a signal into a request to stop at the next step with a checkpoint.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from strata.platform import cluster
from strata.platform.errors import UserError
from strata.platform.recipe import ParallelSection
from strata.platform.runs import Run, State
from strata.training.interrupts import Interrupts
from strata.training.loop import Job, Outcome, train_worker
from strata.training.memory import KEEP_FREED_MEMORY, misfits
from strata.training.progress import TrainingProgress
from strata.training.records import Follower
from strata.training.startup import Startup

POLL_S = 0.25
SAY_EVERY_S = 1.0


def run_workers(job: Job, interrupts: Interrupts, console: Console) -> Outcome:
    job.stop.unlink(missing_ok=True)
    job.starts.unlink(missing_ok=True)
    # Workers have an environment of their own, for which Ray starts new processes: idle ones started ahead are of no use.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    startup = Startup(phases=dict(job.phases))
    with TrainingProgress(console, job.train.steps, startup) as progress, cluster.connected(_cpus(job.parallel)):
        startup.done("Ray")
        interrupts.catch()
        _require_gpus(job.parallel)
        if job.parallel.device == "gpu":
            for line in misfits(job.model, job.train, job.parallel, _gpu_kinds()):
                console.print(line)
        fit = Fit(job)
        interrupts.ask = job.stop.touch
        fit.start()
        follow(fit, job, interrupts, progress, console)
        interrupts.ask = None
        job.stop.unlink(missing_ok=True)
        return fit.outcome()


class Fit(threading.Thread):
    """A daemon: when the command is ended at once, nobody waits for Ray."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        if "RAY_ADDRESS" not in os.environ:  # our own cluster, on this machine: no cloud will take it back
            os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        import ray.train

        from strata.training.controller import trainer_class

        job = self._job
        checkpoints = job.checkpoints
        gpu = job.parallel.device == "gpu"
        trainer = trainer_class()(
            train_worker,
            train_loop_config={"job": job},
            scaling_config=ray.train.ScalingConfig(
                num_workers=job.parallel.workers,
                use_gpu=gpu,
                resources_per_worker={"CPU": job.parallel.cpus_per_worker} | ({"GPU": 1} if gpu else {}),
            ),
            run_config=ray.train.RunConfig(
                storage_path=str(Path(checkpoints.path).parent),
                storage_filesystem=checkpoints.filesystem,
                name=Path(checkpoints.path).name,
                failure_config=ray.train.FailureConfig(max_failures=job.train.max_failures),
                worker_runtime_env=None if gpu else {"env_vars": KEEP_FREED_MEMORY},
            ),
        )
        try:
            self._result = trainer.fit()
        except Exception as error:
            self._error = error

    def outcome(self) -> Outcome:
        if self._error:
            raise _explained(self._error) from self._error
        outcome: Outcome = self._result.return_value
        return outcome


def follow(fit: Fit, job: Job, interrupts: Interrupts, progress: TrainingProgress, console: Console) -> None:
    """Until the workers end: what they record goes to the display and to the run's state."""
    run, follower = Run(job.run), Follower(Run(job.run).metrics)
    state = State("running", steps=job.train.steps)
    said, told, starts = 0.0, False, 1
    alive = True
    while alive:
        fit.join(POLL_S)
        alive = fit.is_alive()  # asked before the last look, so that nothing recorded is missed
        for record in follower.new():
            progress.show(record)
            state = State("running", record["step"], job.train.steps, record["loss"], record.get("val_loss", state.val_loss))
        began = job.starts.read_text().split() if job.starts.exists() else []
        if len(began) > starts:
            starts = len(began)
            console.print(f"Workers were lost; all were started again, from step {began[-1]}.")
        if time.monotonic() - said > SAY_EVERY_S or not alive:
            run.say_running(state)
            said = time.monotonic()
        if interrupts.asked and not told:
            console.print("Stopping after this step, with a checkpoint. (Once more ends at once, without.)")
            told = True


def _cpus(parallel: ParallelSection) -> int:
    return parallel.workers * parallel.cpus_per_worker


def _gpu_kinds() -> list[str]:
    """Of the cluster's GPUs, such as H100."""
    import ray

    prefix = "accelerator_type:"
    return [name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix)]


def _require_gpus(parallel: ParallelSection) -> None:
    import ray

    has = ray.cluster_resources().get("GPU", 0)
    if parallel.device == "gpu" and has < parallel.workers and not cluster.grows():
        fix = "Use parallel.device=cpu, or fewer parallel.workers."
        raise UserError(f"The recipe asks for {parallel.workers} GPUs; Ray sees {has:g}.", fix)


def _explained(error: Exception) -> Exception:
    """Workers that died for want of memory are the user's to mend; everything else keeps its traceback."""
    text = str(error)
    if "OutOfMemory" in text or "out of memory" in text:
        fix = "Lower train.micro_batch or the model's size, or raise parallel.zero."
        return UserError("The workers ran out of memory.", fix)
    return error
