"""What counts as growth, and as a wrong to a client, in a soak."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.soak.footprint import Footprint, ProcessState
from benchmarks.soak.soak import BREAKING, Soak
from benchmarks.soak.visitors import Visits

RANK = {"kind": "rank0 of decode-pocket", "started": 0.0, "rss_mib": 400.0, "descriptors": 100, "threads": 40}


def at_rest(*changes: dict[str, Any], **footprint: Any) -> Footprint:
    """A server of two ranks, with changes to each."""
    processes = {pid: ProcessState(**{**RANK, **change}) for pid, change in enumerate(changes or ({}, {}))}
    found = {"at": 0.0, "processes": processes, "strays": [], "files": names(30), "shared_memory": names(2)}
    return Footprint(**{**found, **footprint})


def names(count: int) -> frozenset[str]:
    return frozenset(f"file{i}" for i in range(count))


def problems(after: Footprint, held: float = 0.0, **visits: Any) -> list[str]:
    return Soak(at_rest(), after, held, Visits(**visits), Counter(), []).problems()


def test_a_server_that_is_as_it_was_has_no_problem():
    assert problems(at_rest()) == []
    assert problems(at_rest({"rss_mib": 420.0, "descriptors": 104, "threads": 41}, {})) == []
    broken = {struck: ["_stream: ReadError('')"] for struck in BREAKING}
    assert problems(at_rest(files=names(29), shared_memory=names(0)), broken=broken) == []


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (at_rest({}, {"rss_mib": 500.0}), "rank0 of decode-pocket: rss_mib 400, at the end 500"),
        (at_rest({}, {"descriptors": 130}), "rank0 of decode-pocket: descriptors 100, at the end 130"),
        (at_rest({}, {"threads": 60}), "rank0 of decode-pocket: threads 40, at the end 60"),
        (at_rest({}, {}, {}), "processes rank0 of decode-pocket: 2, at the end 3"),
        (at_rest({}, {}, {"kind": "zombie"}), "processes zombie: 0, at the end 1"),
        (at_rest(strays=["haproxy"]), "haproxy lives on outside"),
        (at_rest(files=names(31)), "files: 30, at the end 31: file30"),
        (at_rest(shared_memory=names(3)), "shared_memory: 2, at the end 3: file2"),
    ],
)
def test_what_has_grown_is_told(after, problem):
    assert problems(after) == [problem]


def test_blocks_that_are_held_and_requests_that_failed_are_told():
    assert problems(at_rest(), held=3) == ["3 blocks or requests are held for nobody"]
    assert problems(at_rest(), broken={"prefill-pocket": ["_whole: 503"]}) == [
        "a request broke after prefill-pocket: _whole: 503"
    ]
    visits = Visits()
    visits.take("a stream", "body 1", "so")
    visits.take("a stream", "body 1", "so")
    assert visits.wrong == []
    visits.take("a stream", "body 1", "other")
    assert visits.wrong == ["a stream: another text of body 1: 'other', before 'so'"]
