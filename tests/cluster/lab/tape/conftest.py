"""Schedulers of harnesses can be on a tape."""

from __future__ import annotations

from tests.engine.parts.tape.conftest import parts_of_harnesses  # noqa: F401  a fixture
