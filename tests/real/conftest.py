from __future__ import annotations

import pytest

from engine.model.checkpoint import smollm2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave this folder to `make test-real` and `make test-all`, and skip it where the model has not been fetched."""
    for item in items:
        if "tests/real/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
            if not smollm2.path().is_file():
                item.add_marker(pytest.mark.skip(reason="SmolLM2 has not been fetched: manta pull smollm2"))
