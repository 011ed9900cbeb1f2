"""Commands that save and use tapes."""

from __future__ import annotations

import typer

from cluster.cli.parts.tape.replay import replay, tape
from cluster.cli.parts.tape.tune import tune


def add_to(app: typer.Typer, panel: str) -> None:
    app.add_typer(tape, name="tape", rich_help_panel=panel)
    app.command(rich_help_panel=panel)(replay)
    app.command(rich_help_panel=panel)(tune)
