"""Opens one of the ranks above 0."""

from __future__ import annotations

from contextlib import ExitStack

from engine.assembly.load import load
from engine.assembly.open_launcher import open_launcher
from engine.config import EngineConfig
from engine.distributed.plan_broadcast import PlanReceiver
from engine.distributed.tp_group import TPGroup
from engine.runner.worker import Worker


def open_worker(config: EngineConfig, group: TPGroup, host: str = "127.0.0.1") -> Worker:
    """Return a rank above 0 once all ranks have loaded the model. host: IP address at which ranks of other engines
    reach this one. Raises StartupError if any rank cannot start."""
    with ExitStack() as opened, group.starting():
        runner = load(config, group, host).runner
        opened.callback(runner.close)
        receiver = PlanReceiver(group)
        opened.pop_all()
    return Worker(group, runner, open_launcher(runner, group), receiver)
