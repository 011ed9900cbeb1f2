"""Progress bar of a measurement."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(shown: bool | None = None) -> Progress:
    """Return a progress bar on stderr, shown by default if that is a terminal. Redrawn rarely, since it runs during
    measurements."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=2,
        transient=True,
        disable=not (sys.stderr.isatty() if shown is None else shown),
    )
