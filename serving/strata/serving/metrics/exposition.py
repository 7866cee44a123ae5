"""Several processes' metrics as one Prometheus text: the gateway asks every replica for its own and gives out all of them.

Line by line, without parsing: a replica with vLLM's series has some thousand lines, and prometheus_client's parser would
hold the gateway's event loop for a tenth of a second at every scrape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class _Family:
    help: str = ""
    type: str = ""
    samples: list[str] = field(default_factory=list)


def merge(parts: Sequence[tuple[Mapping[str, str], str]]) -> str:
    """Each part is a text as `prometheus_client.generate_latest` writes it, and labels to add to all of its samples: names
    that it does not use itself, values that make its series differ from those of the other parts."""
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
    # A name holds neither a space nor a brace, so the first of them ends it.
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        comma = "" if sample[brace + 1] == "}" else ","
        return f"{sample[: brace + 1]}{added}{comma}{sample[brace + 1 :]}"
    return f"{sample[:space]}{{{added}}}{sample[space:]}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
