"""An endpoint that is measured: one that is running, or one that is started for the measurement."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.serving.bench.clients.load import Target
from strata.serving.bench.contenders import contenders, dummy_model, server, subject
from strata.serving.calibration import facts, fit, rounds
from strata.serving.calibration.fit import Point
from strata.serving.calibration.loads import Load, Sizes
from strata.serving.calibration.recorded import SEQUENCES, STEP_TOKENS
from strata.serving.calibration.replay import Engines
from strata.serving.simulation.calibration import Calibration

VOCAB = 512  # ids of the prompts: every model has them
MOST_CONTEXT = 4096  # of a load; longer prompts would take most of the time
CPU_STEP_TOKENS = 2048  # vLLM's default on CPUs


@dataclass(frozen=True)
class Given:
    """Options that replace what the endpoint reports."""

    max_sequences: int | None
    step_tokens: int | None
    kv_tokens: int | None
    prefill: int
    context: int | None
    clients: int | None
    model: str | None = None  # of an endpoint with several
    cpu: bool = False


@dataclass(frozen=True)
class Endpoint:
    target: Target
    engines: Engines
    kv_tokens: int
    context: int  # of the model
    longest: int  # tokens of a request of the loads
    clients: int

    def sizes(self, concurrency: int, waves: int) -> Sizes:
        return Sizes(self.longest, min(concurrency, self.engines.max_sequences), VOCAB, waves)

    def measure(self, loads: Sequence[Load], number: int, seed: int, console: Console) -> list[Point]:
        with console.status("") as status:
            return rounds.measure(self.target, loads, number, self.clients, seed, status.update)


@contextmanager
def opened(url: str | None, start: str | None, recipe: str, overrides: Sequence[str], given: Given) -> Iterator[Endpoint]:
    if url is not None:
        yield _described(url, given, SEQUENCES, gpu=not given.cpu)
        return
    assert start is not None
    with tempfile.TemporaryDirectory(prefix="strata-calibration-") as temporary:
        folder = Path(temporary) / "dummy"
        dummy_model.write(folder, recipe_file.load(recipe, list(overrides)))
        serve = [word for word in overrides if word.startswith("serve.")]
        served = subject.choose(serve, None, folder, recipe)
        log = cache_dir() / "calibration" / f"{start.partition('+')[0]}.log"
        try:
            with server.running(contenders.find(start), served, True, log) as up:
                at, gpu = f"http://{up.target.host}:{up.target.port}", served.section.device == "gpu"
                yield _described(at, given, served.section.max_sequences, gpu)
        except server.Failed as failed:
            raise UserError(f"{start} did not start: {failed}", f"See {log}.") from None


def _described(url: str, given: Given, max_sequences: int, gpu: bool) -> Endpoint:
    found = facts.read(url, given.model)
    context = found.context or given.context
    kv_tokens = given.kv_tokens or found.kv_tokens
    if kv_tokens is None or context is None:
        lacks, option = ("size of its KV cache", "--kv-tokens") if context else ("context of its model", "--context")
        raise UserError(f"{url} does not report the {lacks}.", f"Set {option}.")
    engines = Engines(
        found.block_size or 16,
        given.max_sequences or max_sequences,
        given.step_tokens or (STEP_TOKENS if gpu else CPU_STEP_TOKENS),
        prefill=given.prefill,
        gpu=gpu,
        full_graphs=gpu and found.strata,
    )
    longest = min(given.context or MOST_CONTEXT, context, kv_tokens // 2)
    return Endpoint(found.target, engines, kv_tokens, context, longest, given.clients or max(1, (os.cpu_count() or 1) // 2))


def fitted(
    points: Sequence[Point],
    engines: Engines,
    kv_tokens: int,
    context: int,
    console: Console,
    known: Mapping[str, float] = fit.NOTHING,
) -> Calibration:
    with console.status("") as status:
        starts = fit.guesses(points, kv_tokens, context, engines, known)
        return fit.fit(starts, engines, points, lambda text: status.update(f"fitting: {text}"), known)
