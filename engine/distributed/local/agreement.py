"""Lets ranks decide together."""

from __future__ import annotations

import logging

from engine.distributed.tp_group import ConnectedGroup

logger = logging.getLogger(__name__)


def all_can(group: ConnectedGroup, problem: str) -> bool:
    """Return whether no rank reports a problem with shared memory. problem: this rank's, or "". Every rank has to call
    this. Raises as `TPGroup.exchange` does."""
    problems = [text for text in group.exchange(problem) if text]
    if problems:
        logger.warning("ranks on one machine use no shared memory, because it is unavailable: %s", problems[0])
    return not problems
