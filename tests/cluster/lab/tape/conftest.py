"""Schedulers of harnesses can be on a tape."""

from __future__ import annotations

from tests.engine.core.tape.conftest import parts_of_harnesses  # noqa: F401  a fixture
