"""How many examples hypothesis tries."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """`count` with `make test-all`, which sets TEST_SEED; an eighth of it in every other run."""
    return count if os.environ.get("TEST_SEED") else max(1, count // 8)
