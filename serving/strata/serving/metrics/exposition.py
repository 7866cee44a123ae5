"""Merges the Prometheus texts of several processes: the gateway collects every replica's metrics and returns them all.

It works line by line, without parsing. A replica with vLLM's series has over a thousand lines, and prometheus_client's parser
would block the gateway's event loop for a tenth of a second per scrape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class _Family:
    help: str = ""
    type: str = ""
    samples: list[str] = field(default_factory=list)


def merge(parts: Sequence[tuple[Mapping[str, str], str]]) -> str:
    """Merges texts in the format of `prometheus_client.generate_latest`. The labels of a part are added to all of its samples;
    they must be new names, and their values must make its series differ from those of the other parts."""
    families: dict[str, _Family] = {}
    for labels, text in parts:
        added = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        family = families.setdefault("", _Family())
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], _Family())
                family.help = family.help or line
            elif line.startswith("# TYPE "):
                family = families.setdefault(line.split(" ", 3)[2], _Family())
                family.type = family.type or line
            elif line:
                family.samples.append(_label(line, added))
    lines = (line for family in families.values() for line in (family.help, family.type, *family.samples) if line)
    return "".join(f"{line}\n" for line in lines)


def _label(sample: str, added: str) -> str:
    if not added:
        return sample
    # A metric name contains no space and no brace, so the first of them ends it.
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        comma = "" if sample[brace + 1] == "}" else ","
        return f"{sample[: brace + 1]}{added}{comma}{sample[brace + 1 :]}"
    return f"{sample[:space]}{{{added}}}{sample[space:]}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
