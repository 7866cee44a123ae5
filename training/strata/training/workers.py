"""Runs the Ray Train workers and follows them from the driver.

Ray's `fit` blocks and, on the main thread, aborts the workers on Ctrl-C. So it runs on its own thread, while the main thread
shows progress and translates a signal into a request to stop at the next step with a checkpoint.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.ray_cluster import cluster, excluded_nodes
from strata.platform.ray_cluster.watch import ClusterDied, ClusterWatch
from strata.platform.recipe import ParallelSection, TrainSection
from strata.platform.runs import Run, State
from strata.training import failures
from strata.training.checkpoint import format
from strata.training.diffusion import progress as picture_progress
from strata.training.elastic import autoscaling
from strata.training.elastic.capacity import CapacityWatch, resources, survey_within
from strata.training.elastic.resizing import Resizing
from strata.training.elastic.supervisor import Attempt, Supervisor
from strata.training.evaluation import samples
from strata.training.exclusion.news import ExclusionNews
from strata.training.exclusion.placement import Placement
from strata.training.exclusion.suspects import MOST_REPLACED, Suspects
from strata.training.interrupts import Interrupts
from strata.training.logs import attempts
from strata.training.loop import Job, Outcome, train_worker
from strata.training.memory import KEEP_FREED_MEMORY, memory_warnings
from strata.training.memory_copies import folders, peers
from strata.training.memory_copies.peers import Holders
from strata.training.metrics.progress import TrainingProgress
from strata.training.metrics.records import Follower, Record
from strata.training.metrics.startup import Startup
from strata.training.schedule.time_budget import line as budget_line
from strata.training.watchdog.watch import Watch

POLL_S = 0.25
STATE_EVERY_S = 1.0
STILL_STARTING_S = 20.0
SURVEY_S = 5.0
STALL_S = 5.0  # or four times the longest step so far, if that is longer


def run_workers(job: Job, interrupts: Interrupts, console: Console) -> Outcome:
    excluded_nodes.read(job.run)  # raises for a damaged file
    for path in (job.stop, job.resize, job.starts, job.nodes, job.phase):
        path.unlink(missing_ok=True)
    # Workers have their own runtime environment, for which Ray starts new processes: prestarted ones would stay idle.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    startup = Startup(phases=dict(job.phases))
    steps = job.train.steps
    most, least = (count * job.parallel.cpus_per_worker for count in (int(job.parallel.workers), job.parallel.workers.least))
    with (
        TrainingProgress(console, steps, startup) as progress,
        folders.owned(_copies(job)) as copies,
        cluster.connected(most, least=least) as ours,
    ):
        startup.done("Ray")
        interrupts.catch()
        _require_gpus(job.parallel)
        kinds = _gpu_kinds() if job.parallel.device == "gpu" else []
        if job.model.picture is None:
            for line in memory_warnings(job.model, job.train, job.parallel, kinds):
                console.print(line)
        watch, holders, exclusions = ClusterWatch(ours), Holders(_copies(job)), ExclusionNews(job)
        interrupts.request_stop = lambda: _request_stop(job, console)

        def require_cluster() -> None:
            if death := watch.death():
                watch.kill_what_is_left()
                copies.leave()  # to the command that resumes the run
                fix = f"Start the cluster again, then resume with: strata train --resume {job.run.name}"
                raise ClusterDied(death, fix, job.run.name if ours and not interrupts.stop_requested else None)

        def attempt(job: Job, resizing: Resizing | None) -> Fit:
            """Runs the workers in a fixed layout until they or their cluster end."""
            fit = Fit(job, holders, elastic=resizing is not None)
            suspects = Suspects(
                job.run, lambda: survey_within(SURVEY_S, resources(job.parallel), job.run), _enough(job, resizing)
            )
            watchdog = Watch(job.run, job.train.watchdog, job.parallel, suspects=suspects)
            fit.start()
            try:
                follow(fit, job, interrupts, progress, console, watch, watchdog, resizing, exclusions)
            finally:
                watchdog.stop()
            require_cluster()
            return fit

        try:
            if job.parallel.workers.elastic:
                outcome = _run_elastic(job, attempt, require_cluster, kinds, interrupts, console)
            else:
                outcome = attempt(job, None).outcome()
        finally:
            watch.stop()
            interrupts.request_stop = None
        peers.close(_copies(job))
        job.stop.unlink(missing_ok=True)
        return outcome


def _run_elastic(
    job: Job,
    attempt: Callable[[Job, Resizing], Attempt],
    require_cluster: Callable[[], None],
    kinds: list[str],
    interrupts: Interrupts,
    console: Console,
) -> Outcome:
    worker = resources(job.parallel)
    # On mixed GPUs the planner's times would be those of one kind.
    gpu = hardware.gpu(kinds[0]) if len(kinds) == 1 and hardware.has_gpu(kinds[0]) and job.model.picture is None else None
    watch = CapacityWatch(worker, job.run)
    with autoscaling.requested(worker, int(job.parallel.workers)):
        try:
            return Supervisor(job, attempt, watch, require_cluster, interrupts, console, gpu).run()
        finally:
            watch.stop()


def _enough(job: Job, resizing: Resizing | None) -> Callable[[int], bool]:
    """True for a number of workers on which the run can continue."""
    return resizing.possible if resizing else lambda workers: workers >= int(job.parallel.workers)


def _request_stop(job: Job, console: Console) -> None:
    """Requests a stop of the workers. Runs in a signal handler, where an exception would end the command immediately."""
    try:
        job.stop.touch()
    except OSError as error:
        console.print(f"The stop request cannot be written: {error}. A second signal ends the run without a checkpoint.")


class Fit(threading.Thread):
    """Thread that runs Ray's `fit`. A daemon, so a command that ends immediately does not wait for Ray."""

    def __init__(self, job: Job, holders: Holders, elastic: bool = False) -> None:
        """With `elastic`, the first failure ends `fit`: the next attempt may have another layout."""
        super().__init__(daemon=True)
        self._job, self._holders, self._elastic = job, holders, elastic
        self._result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        # No cloud preempts a local cluster, and the driver of an elastic run watches for drain notices itself.
        if self._elastic or "RAY_ADDRESS" not in os.environ:
            os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        import ray.train

        from strata.training.patches import file_rendezvous
        from strata.training.patches.train_controller import trainer_class
        from strata.training.patches.worker_placement import WorkerPlacement

        job = self._job
        checkpoints = job.checkpoints
        gpu = job.parallel.device == "gpu"
        trainer = trainer_class()(
            train_worker,
            train_loop_config={"job": job},
            torch_config=file_rendezvous.torch_config(partial(_each_start, job, self._holders)),
            scaling_config=ray.train.ScalingConfig(
                num_workers=int(job.parallel.workers), use_gpu=gpu, resources_per_worker=resources(job.parallel)
            ),
            run_config=ray.train.RunConfig(
                storage_path=str(Path(checkpoints.path).parent),
                storage_filesystem=checkpoints.filesystem,
                name=Path(checkpoints.path).name,
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0)
                if self._elastic
                else ray.train.FailureConfig(max_failures=job.train.max_failures + _uncounted(job.train)),
                worker_runtime_env=None if gpu else {"env_vars": KEEP_FREED_MEMORY},
                callbacks=[WorkerPlacement(Placement(job.run, resources(job.parallel), self._elastic or cluster.grows()))],
            ),
        )
        try:
            # Ray's list of an earlier attempt names checkpoints that Strata has deleted since, which would make Ray fail.
            checkpoints.delete(format.RAY_SNAPSHOT)
            self._result = trainer.fit()
        except (Exception, SystemExit) as error:  # Ray raises SystemExit in a thread that waits on a lost connection
            self.error = error

    def outcome(self) -> Outcome:
        if self.error:
            explained = failures.explain(self.error, self._job.run.name)
            raise (explained or self.error) from self.error
        outcome: Outcome = self._result.return_value
        return outcome


def follow(
    fit: Fit,
    job: Job,
    interrupts: Interrupts,
    progress: TrainingProgress,
    console: Console,
    watch: ClusterWatch,
    watchdog: Watch,
    resizing: Resizing | None = None,
    exclusions: ExclusionNews | None = None,
) -> None:
    """Shows the workers' records and updates the run's state until the workers or their cluster end."""
    run, follower = Run(job.run), Follower(Run(job.run).metrics)
    state = State("running", job.begun, job.train.steps, saved=job.stored)
    for record in follower.new():  # steps before this start are not shown again
        state = _state_after(state, record)
    earlier = len(job.starts.read_text().splitlines()) if resizing and job.starts.exists() else 0  # starts in other layouts
    written, announced, writable, starts, stalls = 0.0, False, True, earlier + 1, StallDetector()
    shortened, phase = False, None
    alive = True
    while alive and not watch.death():
        fit.join(POLL_S)
        alive = fit.is_alive()  # checked before the last read, so that no record is missed
        records = list(follower.new())
        if (now := _phase(job)) != phase and now is not None:
            progress.starting(now)
            stalls.starting()
        phase = now
        began = [line.split() for line in job.starts.read_text().splitlines()] if job.starts.exists() else []
        for record in records:
            if len(began) > earlier and record["step"] > int(began[-1][0]):  # otherwise truncated and read from the start
                progress.show(record)
                stalls.step()
                if job.prompts and "val_loss" in record:
                    _print_samples(run, record["step"], console)
                if "picture" in record:
                    console.print(f"  pictures: {picture_progress.folder(run) / record['picture']}", markup=False)
                if not shortened and (line := budget_line(record, job.train)):
                    console.print(line)
                    shortened = True
            state = _state_after(state, record)
        if len(began) > starts:
            starts = len(began)
            step, source = began[-1]
            origin = "memory" if source == "memory" else f"the checkpoint of step {step}" if int(step) else "the start"
            console.print(f"Workers died; Ray restarted all of them. Continued from step {step}, from {origin}.")
        sources = (watch, watchdog, stalls, resizing, exclusions)
        for line in [line for source in sources if source for line in source.news()]:
            console.print(line)
        if time.monotonic() - written > STATE_EVERY_S or not alive:
            writable = _write_state(run, state, writable, console)
            written = time.monotonic()
        if interrupts.stop_requested and not announced:
            console.print("Stopping after this step, with a checkpoint. (A second signal ends the run without one.)")
            announced = True


def _phase(job: Job) -> str | None:
    try:
        return job.phase.read_text()
    except FileNotFoundError:
        return None


def _print_samples(run: Run, step: int, console: Console) -> None:
    for sample in samples.read(run):
        if sample["step"] == step:
            console.print(f"  {sample['prompt']!r} continues {sample['text']!r}", markup=False)


def _state_after(state: State, record: Record) -> State:
    saved = max(state.saved, record.get("checkpoint_step", 0))
    steps = record.get("plan", {}).get("steps", state.steps)
    val_loss, layout = record.get("val_loss", state.val_loss), record.get("layout", state.layout)
    return State("running", record["step"], steps, record["loss"], val_loss, saved=saved, layout=layout)


def _write_state(run: Run, state: State, writable: bool, console: Console) -> bool:
    """Writes state.json and returns whether that worked. A failure does not end the run: the workers detect a full disk."""
    try:
        run.write_running(state)
    except OSError as error:
        if writable:
            console.print(f"{run.path / 'state.json'} cannot be written ({error.strerror}); training continues.")
        return False
    return True


class StallDetector:
    """Reports that no step has finished for a while: Ray reports a lost node only after half a minute."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()
        self._steps, self._longest, self._reported = 0, 0.0, False

    def step(self) -> None:
        now = time.monotonic()
        if self._steps and not self._reported:
            self._longest = max(self._longest, now - self._last)
        self._steps, self._last, self._reported = self._steps + 1, now, False

    def starting(self) -> None:
        """The workers show their progress before the first step: they are not silent."""
        if not self._steps:
            self._last = time.monotonic()

    def news(self) -> list[str]:
        silent = time.monotonic() - self._last
        if self._reported or silent < (max(STALL_S, 4 * self._longest) if self._steps else STILL_STARTING_S):
            return []
        self._reported = True
        if not self._steps:
            return [
                f"The workers are still starting after {silent:.0f} s: the machine is busy, or the cluster has no free resources."
            ]
        return [f"No step for {silent:.0f} s: waiting for the workers. If one died, Ray restarts all of them."]


def _each_start(job: Job, holders: Holders) -> Callable[[int], None]:
    """Runs where the controller runs, before each start of the workers."""
    holders.start_missing()
    return attempts.begin(Run(job.run))


def _copies(job: Job) -> str:
    """Id of the folders for copies of the state in memory, empty for a run without copies."""
    return job.id if job.train.memory_copy_every else ""


def _uncounted(train: TrainSection) -> int:
    """Restarts that are no failures: batches that `train.on_spike` may leave out, and slow ranks that are replaced."""
    left_out = train.on_spike.most if train.on_spike else 0
    return left_out + (MOST_REPLACED if train.watchdog and train.watchdog.replace_stragglers else 0)


def _gpu_kinds() -> list[str]:
    """GPU types of the cluster, such as H100."""
    import ray

    prefix = "accelerator_type:"
    return [name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix)]


def _require_gpus(parallel: ParallelSection) -> None:
    import ray

    has, needed = ray.cluster_resources().get("GPU", 0), parallel.workers.least
    if parallel.device == "gpu" and has < needed and not cluster.grows():
        fix = "Set parallel.device=cpu, or lower parallel.workers."
        raise UserError(f"parallel.workers={parallel.workers} needs {needed} GPUs; the Ray cluster has {has:g}.", fix)
