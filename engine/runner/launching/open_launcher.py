"""Chooses what launches the steps of a rank."""

from __future__ import annotations

from engine.distributed.expert_shard_plan import exchange_of
from engine.distributed.tp_group import TPGroup
from engine.runner.launching.launcher import Launcher, LaunchThread
from engine.runner.model_runner import ModelRunner


def open_launcher(runner: ModelRunner, group: TPGroup, in_thread: bool = False) -> Launcher:
    """Return the launcher of a rank. in_thread: whether steps of an engine that shares no experts have a thread."""
    if exchange_of(group) is not None:
        from engine.runner.launching.wave_launcher import open_wave_launcher  # it needs pyzmq

        return open_wave_launcher(runner, group)
    return LaunchThread(runner) if in_thread else Launcher(runner)
