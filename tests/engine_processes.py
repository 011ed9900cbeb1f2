"""Processes that have an engine: they are forked from one that has imported it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def with_engine() -> ForkServerContext:
    """Return what starts processes that have imported the engine: they are forked from one that did, since that takes
    seconds. Nor do they import anything for a first engine of text. Their environment is that of the first test that
    asked for one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.rank_pool", "tests.engine.kv_transfer.engine_process", "tests.started_engine"]
    )
    return context
