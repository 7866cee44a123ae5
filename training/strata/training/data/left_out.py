"""Counts of files and documents that training skips, so that nothing is dropped without a line on the console."""

import os
from dataclasses import dataclass, field
from pathlib import Path

NAMES = 5


@dataclass
class LeftOut:
    """Skipped parts of a corpus. `files` maps a skipped file to the reason; `empty` counts rows and lines without text."""

    read: int = 0
    files: dict[Path, str] = field(default_factory=dict)
    documents: int = 0
    empty: int = 0
    first_empty: str = ""

    def nonblank(self, document: str | None, unit: str, number: int, source: str) -> str | None:
        """Returns the document, or None if it has no text. Counts both cases."""
        if document and not document.isspace():
            self.documents += 1
            return document
        self.empty += 1
        self.first_empty = self.first_empty or f"{unit} {number:,} of {source}"
        return None

    def clear(self) -> None:
        """Resets the counts for another pass over the corpus."""
        self.files.clear()
        self.read = self.documents = self.empty = 0
        self.first_empty = ""

    def lines(self) -> list[str]:
        lines = []
        if self.files:
            named = [f"{shown(path.name)} ({reason})" for path, reason in list(self.files.items())[:NAMES]]
            more = f" and {len(self.files) - NAMES:,} more" if len(self.files) > NAMES else ""
            total = self.read + len(self.files)
            lines.append(f"{len(self.files):,} of {total:,} files left out: {', '.join(named)}{more}.")
        if self.empty:
            total = self.documents + self.empty
            lines.append(f"{self.empty:,} of {total:,} documents left out: null or blank, the first at {self.first_empty}.")
        return lines


def shown(name: str | Path) -> str:
    """File name in printable form. Linux file names are bytes and may not be valid UTF-8."""
    return os.fsencode(name).decode(errors="replace")
