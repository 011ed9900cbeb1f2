"""What an engine answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.wire.token_delta import TokenDelta


def deltas_of(core: Any, *, errors: bool = False) -> Iterator[TokenDelta]:
    """Run an engine until its requests have ended, and yield all deltas. The books must balance after every step.
    errors: whether requests may end with one."""
    while core.has_work:
        for event in core.step():
            assert errors or event.delta.error is None, event.delta.error
            yield event.delta
        core.scheduler.check()
