from __future__ import annotations

import logging

import pytest

from engine.distributed import refusals
from engine.distributed.refusals import Refusals, add_up


@pytest.fixture
def clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(refusals.time, "monotonic", lambda: clock[0])
    return clock


def test_everything_is_counted_and_a_socket_that_is_flooded_writes_one_line_in_a_while(clock, caplog):
    made = Refusals()
    with caplog.at_level(logging.WARNING, refusals.__name__):
        for _ in range(1000):
            made.add("commands", "malformed", "junk")
        made.add("commands", "unauthenticated", "a stranger")
        made.add("tokens", "malformed", "junk")
        assert [record.message.split()[1] for record in caplog.records] == ["socket=commands", "socket=tokens"]
        clock[0] += refusals.LOG_PERIOD_S
        made.add("commands", "malformed", "junk")
    assert caplog.messages[-1] == "refused socket=commands reason=malformed total=1001: junk"
    assert made.counts() == {"commands": {"malformed": 1001, "unauthenticated": 1}, "tokens": {"malformed": 1}}


def test_counts_of_several_processes_are_added_up_by_socket_and_reason():
    one = {"a": {"malformed": 1}, "b": {"unexpected": 2}}
    assert add_up(one, {}, {"a": {"malformed": 3, "unauthenticated": 4}}) == {
        "a": {"malformed": 4, "unauthenticated": 4},
        "b": {"unexpected": 2},
    }
    assert one == {"a": {"malformed": 1}, "b": {"unexpected": 2}}, "it was changed"
