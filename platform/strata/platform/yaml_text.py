"""Readable YAML: keys in insertion order, multi-line strings as block scalars, no aliases."""

from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # anchors make manifests hard to read


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump_all(documents: Iterable[Any], width: int = 120) -> str:
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=width, allow_unicode=True)
    return text
