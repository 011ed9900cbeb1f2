"""A finding of `manta doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "warning", "problem"]
    """`warning`: Manta runs, but slower or with fewer features than possible. `problem`: it cannot run."""
    topic: str
    message: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.message}. {self.advice}" if self.advice else self.message
