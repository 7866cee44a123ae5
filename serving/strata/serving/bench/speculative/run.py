"""Runs the same greedy requests on endpoints that differ in `serve.speculative` alone, and writes the comparison."""

import json
import re
import statistics
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.serving import access
from strata.serving.bench.contenders import contenders, server, subject
from strata.serving.speculation import draft

PLAIN = "none"
COUNTERS = {
    name: re.compile(rf"^vllm:spec_decode_num_{name}_total\{{[^}}]*\}} (\S+)$", re.MULTILINE)
    for name in ("drafts", "draft_tokens", "accepted_tokens")
}
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Load:
    prompts: int
    characters: int  # of a prompt
    tokens: int  # of an answer
    concurrency: tuple[int, ...]
    rounds: int


@dataclass(frozen=True)
class Methods:
    draft: str | None
    tokens: int

    def words(self) -> dict[str, str]:
        """Values of serve.speculative by method."""
        found = {PLAIN: "null", "ngram": f"{{method: ngram, tokens: {self.tokens}}}"}
        if self.draft is not None:
            found["draft"] = f"{{method: draft, draft: {draft.folder(self.draft).resolve()}, tokens: {self.tokens}}}"
        return found


@dataclass(frozen=True)
class Measured:
    rates: dict[int, tuple[float, ...]]  # tokens per second of each round, by concurrency
    answers: tuple[tuple[int, ...], ...]  # token ids by prompt, of the first level
    stable: bool  # every level and round gave these answers
    counted: dict[str, float]  # drafts, drafted and accepted tokens


def bench(
    overrides: Sequence[str],
    run: str | None,
    model: Path | None,
    methods: Methods,
    load: Load,
    text: Path | None,
    path: Path,
    console: Console,
) -> bool:
    """Returns whether all greedy tokens are those without speculation."""
    served = subject.choose(overrides, run, model, None)
    prompts = parts(_text(text), load)
    found = {}
    for method, words in methods.words().items():
        with console.status(f"{method}: {load.rounds} rounds of {load.prompts} prompts …"):
            found[method] = _measure(served, method, words, prompts, load)
    record = as_json(load, methods, found)
    console.print(table(record))
    write_atomic(path, json.dumps(record, indent=2))
    console.print(f"written to {path}")
    return all(each["same_tokens"] for each in record["methods"].values())


def _text(file: Path | None) -> str:
    if file is not None:
        if not file.is_file():
            raise UserError(f"There is no file {file}.", "Give a text file: --text FILE")
        return file.read_text(errors="replace")
    library = Path(sysconfig.get_path("stdlib"))
    return "\n".join(source.read_text(errors="replace") for source in sorted(library.glob("*.py"))[::4])


def parts(text: str, load: Load) -> list[str]:
    """Prompts from all over the text, which overlap if it is short."""
    last = len(text) - load.characters
    if last < 0:
        raise UserError(f"The text has {len(text)} characters, and a prompt {load.characters}.", "Lower --input.")
    return [text[begin : begin + load.characters] for begin in (last * number // load.prompts for number in range(load.prompts))]


def _measure(served: subject.Subject, method: str, words: str, prompts: Sequence[str], load: Load) -> Measured:
    base = "strata-pd" if served.section.prefill.replicas else "strata"
    contender = contenders.find(f"{base}+serve.speculative={words}")
    log = cache_dir() / "bench" / "logs" / f"speculative-{method}.log"
    try:
        with server.running(contender, served, False, log) as up:
            url = f"http://{up.target.host}:{up.target.port}"
            with httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=access.headers_for(url)) as http:
                return drive(http, served.model_id, prompts, load)
    except server.Failed as failed:
        raise UserError(f"The endpoint with serve.speculative={words} did not start: {failed}", f"See {log}.") from None


def drive(http: httpx.Client, model: str, prompts: Sequence[str], load: Load) -> Measured:
    rates: dict[int, list[float]] = {level: [] for level in load.concurrency}
    answers: list[tuple[tuple[int, ...], ...]] = []

    def ask(prompt: str) -> tuple[int, ...]:
        body = {"model": model, "prompt": prompt, "max_tokens": load.tokens, "temperature": 0}
        answer = http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
        return tuple(answer.raise_for_status().json()["choices"][0]["token_ids"])

    for prompt in prompts[:2]:  # compiles what the first requests of an engine compile
        ask(prompt)
    before = counters(http.get("/metrics").raise_for_status().text)
    for _ in range(load.rounds):
        for level in load.concurrency:
            with ThreadPoolExecutor(level) as pool:
                began = time.perf_counter()
                answers.append(tuple(pool.map(ask, prompts)))
                rates[level].append(sum(map(len, answers[-1])) / (time.perf_counter() - began))
    after = counters(http.get("/metrics").raise_for_status().text)
    return Measured(
        {level: tuple(each) for level, each in rates.items()},
        answers[0],
        all(each == answers[0] for each in answers),
        {name: after[name] - before[name] for name in after},
    )


def counters(text: str) -> dict[str, float]:
    return {name: sum(map(float, pattern.findall(text))) for name, pattern in COUNTERS.items()}


def as_json(load: Load, methods: Methods, found: dict[str, Measured]) -> dict[str, Any]:
    plain = found[PLAIN]
    return {
        **benchmark_record.header("speculative"),
        "load": asdict(load),
        "draft": methods.draft,
        "tokens": methods.tokens,
        "methods": {
            method: {
                "tokens_per_s": {level: statistics.median(each.rates[level]) for level in load.concurrency},
                "ratio": {
                    level: statistics.median(each.rates[level]) / statistics.median(plain.rates[level])
                    for level in load.concurrency
                },
                "accepted_share": each.counted["accepted_tokens"] / max(1.0, each.counted["draft_tokens"]),
                "accepted_per_draft": each.counted["accepted_tokens"] / max(1.0, each.counted["drafts"]),
                "same_tokens": each.stable and each.answers == plain.answers,
            }
            for method, each in found.items()
        },
    }


def table(record: dict[str, Any]) -> Table:
    levels = record["load"]["concurrency"]
    titles = [title for level in levels for title in (f"tokens/s at {level}", "ratio")]
    made = Table("speculative", *titles, "accepted", "per draft", "same tokens", box=None, header_style="bold")
    for method, each in record["methods"].items():
        rates = [word for level in levels for word in (f"{each['tokens_per_s'][level]:,.1f}", f"{each['ratio'][level]:.2f}")]
        drafted = ("", "") if method == PLAIN else (f"{each['accepted_share']:.1%}", f"{each['accepted_per_draft']:.2f}")
        made.add_row(method, *rates, *drafted, "yes" if each["same_tokens"] else "no")
    return made
