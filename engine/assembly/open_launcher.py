"""Chooses what launches the steps of a rank."""

from __future__ import annotations

from engine.distributed.tp_group import TPGroup
from engine.runner.launcher import Launcher, LaunchThread
from engine.runner.model_runner import ModelRunner


def open_launcher(runner: ModelRunner, group: TPGroup, in_thread: bool = False) -> Launcher:
    """Return the launcher of a rank: that of a part, if one has its own. group: the ranks of the engine. in_thread:
    whether steps have a thread otherwise."""
    for launcher in runner.parts.launcher:
        return launcher(runner, group)
    return LaunchThread(runner) if in_thread else Launcher(runner)
