"""Schedulers of harnesses can be on a tape."""

from __future__ import annotations

import pytest

from tests.engine.parts.tape.taped import kinds_of_tests


@pytest.fixture(autouse=True)
def parts_of_harnesses(monkeypatch):
    monkeypatch.setattr("engine.parts.tape.snapshot.KINDS", kinds_of_tests())
