"""Engines that share experts, as their processes start them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.door.journal import Journal
from engine.errors import StartupError
from engine.offline import engine_group


class Ended(Journal):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_start_that_fails_in_another_engine_ends_the_tape_of_the_first(monkeypatch):
    core = SimpleNamespace(journal=Ended(), max_model_len=8)
    monkeypatch.setattr(engine_group, "DataParallelGroup", lambda *_: None)
    monkeypatch.setattr(engine_group, "build_engine", lambda *_, **__: core)

    def exchange(mine: Any) -> list[Any]:
        if mine:  # the address of the inbox; then all wait for each other
            return []
        raise StartupError("rank 1: no memory")

    with pytest.raises(StartupError, match="no memory"):
        engine_group.start_engines(EngineConfig(model="m"), SimpleNamespace(key=None, exchange=exchange))
    assert core.journal.is_closed


def test_a_start_that_fails_elsewhere_ends_the_tape_of_an_engine_in_a_child(monkeypatch):
    server = SimpleNamespace(journal=Ended(), address="tcp://127.0.0.1:1")
    monkeypatch.setattr(engine_group, "DataParallelGroup", lambda *_: SimpleNamespace(rank=0, engine=1))
    monkeypatch.setattr(engine_group, "EngineServer", lambda *_, **__: server)

    def exchange(mine: str) -> list[str]:
        if mine == server.address:
            raise StartupError("rank 0: no memory")
        return ["tcp://127.0.0.1:2"]

    with pytest.raises(StartupError, match="no memory"):
        engine_group.start_rank(EngineConfig(model="m"), SimpleNamespace(host="127.0.0.1", exchange=exchange))
    assert server.journal.is_closed
