"""How many examples hypothesis tries."""

from __future__ import annotations

import os


def examples(count: int, parts: int = 8) -> int:
    """`count` with `make test-all`, which sets TEST_SEED; an eighth of it in every other run, or another part."""
    return count if os.environ.get("TEST_SEED") else max(1, count // parts)
