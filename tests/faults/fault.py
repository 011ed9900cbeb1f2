"""A fault to plant: what a slip of the hand could do to one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    says: str  #: what is wrong then
    file: str
    old: str  #: is there once
    new: str
    tests: tuple[str, ...]  #: files and ids of tests, of which one finds it

    def plant(self, tree: Path) -> str:
        """Write the fault into a tree and return the file's text without it. Raises ValueError if `old` is not there
        exactly once."""
        path = tree / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} must have these lines once, not {count} times:\n{self.old}")
        path.write_text(text.replace(self.old, self.new))
        return text
