"""Adapters that come and go under load: random ones on the served model, loaded, asked and removed in turn."""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.serving.chaos.client import Attempt, fresh_connections, send
from strata.serving.chaos.requests import TOKEN_IDS, Request

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
RETRY_FOR_S = 120.0
WAIT_S = 0.2
CHANGE_S = 90.0  # for one change
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Adapters:
    """Folders by name. Requests name the steady ones; the others come and go."""

    steady: Mapping[str, Path]
    passing: Mapping[str, Path]

    def overrides(self) -> list[str]:
        """Settings of the endpoint: fewer slots and less memory than adapters, so that they are evicted too."""
        load = ", ".join(f"{name}: {folder}" for name, folder in self.steady.items())
        slots = max(1, (len(self.steady) + 1) // 2)
        memory = max(slots, len(self.steady))
        root = next(iter({**self.steady, **self.passing}.values())).parent
        return [f"serve.adapters={{slots: {slots}, in_memory: {memory}, rank: {RANK}, roots: [{root}], load: {{{load}}}}}"]


def make(base: Path, count: int, seed: int) -> Adapters:
    """Writes `count` adapters, of which the first half is steady."""
    root = cache_dir() / "chaos" / "adapters"
    folders = {f"adapter-{number}": root / f"{seed}-{number}" for number in range(count)}
    for number, folder in enumerate(folders.values()):
        _write(base, folder, seed * count + number)
    names = list(folders)
    half = (count + 1) // 2
    return Adapters({name: folders[name] for name in names[:half]}, {name: folders[name] for name in names[half:]})


def _write(base: Path, folder: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    noise = np.random.default_rng(seed)
    tensors = {}
    for name, (outputs, inputs) in _projections(base):
        path = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{path}.lora_A.weight"] = (noise.standard_normal((RANK, inputs)) * 0.1).astype(np.float32)
        tensors[f"{path}.lora_B.weight"] = (noise.standard_normal((outputs, RANK)) * 0.1).astype(np.float32)
    if not tensors:
        raise UserError(f"{base} has none of the projections {', '.join(TARGETS)}.", "Use another model, or omit --adapters.")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))


def _projections(base: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for file in sorted(base.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name.endswith(tuple(f".{target}.weight" for target in TARGETS)):
                yield name, tuple(entry["shape"])


@dataclass
class Churn:
    """Loads, asks and removes the passing adapters in turn, and records what went wrong."""

    url: str
    passing: Mapping[str, Path]
    load_s: list[float] = field(default_factory=list)  # of loads that no gateway's death broke
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _expected: dict[str, str] = field(default_factory=dict)

    async def go(self, over: Callable[[], bool], excused: Callable[[Attempt], bool] = lambda attempt: False) -> None:
        if not self.passing:
            return
        async with fresh_connections(self.url) as http:
            for name, folder in itertools.cycle(self.passing.items()):
                if over():
                    return
                began = time.monotonic()
                tries = await self._change(http, "load", {"lora_name": name, "lora_path": str(folder)})
                if tries == 1:
                    self.load_s.append(time.monotonic() - began)
                await self._ask(http, name, excused)
                await self._change(http, "unload", {"lora_name": name})

    async def _change(self, http: httpx.AsyncClient, what: str, body: dict[str, Any]) -> int:
        """Tries that one change needed. A gateway that dies may have made it, so that an unload finds nothing."""
        deadline = time.monotonic() + RETRY_FOR_S
        for tries in itertools.count(1):
            try:
                answer = await http.post(f"/v1/{what}_lora_adapter", json=body, timeout=CHANGE_S)
                gone = what == "unload" and tries > 1 and answer.status_code == 404
                if answer.is_success or gone:
                    return tries
                if answer.status_code != 503:
                    self.failures.append(f"{what} {body['lora_name']}: HTTP {answer.status_code}: {answer.text[:300]}")
                    return tries
                last = answer.text[:300]
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                self.failures.append(f"{what} {body['lora_name']}: {last}")
                return tries
            await asyncio.sleep(WAIT_S)
        raise AssertionError("unreachable")

    async def _ask(self, http: httpx.AsyncClient, name: str, excused: Callable[[Attempt], bool]) -> None:
        """One greedy answer, the same each time the adapter returns."""
        body = {"model": name, "prompt": list(TOKEN_IDS[:16]), "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
        request = Request("/v1/completions", body)
        attempt = await send(http, request)
        deadline = time.monotonic() + RETRY_FOR_S
        while excused(attempt) and time.monotonic() < deadline:
            await asyncio.sleep(WAIT_S)
            attempt = await send(http, request)
        if attempt.answer is None:
            self.failures.append(f"request to {name}: {attempt.error}")
        elif self._expected.setdefault(name, attempt.answer.text) != attempt.answer.text:
            self.failures.append(f"request to {name}: {attempt.answer.text!r} instead of {self._expected[name]!r}")
        else:
            self.answered += 1


@dataclass(frozen=True)
class Result:
    """Adapters that came and went, in the undisturbed and the disturbed run."""

    loads: int
    load_p50_s: float | None  # undisturbed
    load_max_s: float | None
    answered: int
    failures: Sequence[str]

    @staticmethod
    def of(churn: Churn, undisturbed: int) -> "Result":
        """`undisturbed`: number of the first loads."""
        seconds = churn.load_s[:undisturbed]
        return Result(
            loads=len(churn.load_s),
            load_p50_s=statistics.median(seconds) if seconds else None,
            load_max_s=max(seconds, default=None),
            answered=churn.answered,
            failures=tuple(churn.failures),
        )

    def line(self) -> str:
        took = "" if self.load_p50_s is None else f", p50 {self.load_p50_s:.3f} s and at most {self.load_max_s:.3f} s undisturbed"
        return f"adapters: {self.loads} loads{took}; {self.answered} requests to them answered; {len(self.failures)} failures"
