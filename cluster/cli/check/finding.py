"""A finding of `manta doctor`, and how findings are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Level = Literal["ok", "warning", "problem"]
STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    """`warning`: Manta runs, but slower or with less than it could. `problem`: what was asked for will not run."""
    topic: str
    told: str
    advice: str = ""


def show(findings: Iterable[Finding], console: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        told = f"{finding.told}. {finding.advice}" if finding.advice else finding.told
        table.add_row(Text(finding.level, STYLES[finding.level]), Text(finding.topic), Text(told))
    console.print(table)
