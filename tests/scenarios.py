"""Runs tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a test, which has 150 s: its first kernel may have to be compiled on a busy machine."""
    asyncio.run(asyncio.wait_for(scenario, 150))
