"""The progress bar of offline calls."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.errors import InvalidParameter


def progress_bar(use_tqdm: bool) -> Progress:
    """Return a bar that is shown if `use_tqdm` is True. Raises InvalidParameter for vLLM's third form, a function that
    makes the bar."""
    if not isinstance(use_tqdm, bool):
        raise InvalidParameter("use_tqdm", use_tqdm, "True or False, because the bar is Manta's own")
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        disable=not use_tqdm,
        transient=False,
    )
