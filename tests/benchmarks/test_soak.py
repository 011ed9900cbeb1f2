"""What counts as growth, and as a wrong to a client, in a soak."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.soak.bills import Bills
from benchmarks.soak.footprint import Footprint, ProcessState
from benchmarks.soak.soak import BREAKING, Soak, arguments
from benchmarks.soak.visitors import Visits
from cluster.config.app_config import AppConfig

RANK = {"kind": "rank0 of decode-pocket", "started": 0.0, "rss_mib": 400.0, "descriptors": 100, "threads": 40}


def at_rest(*changes: dict[str, Any], **footprint: Any) -> Footprint:
    """A server of two ranks, with changes to each."""
    processes = {pid: ProcessState(**{**RANK, **change}) for pid, change in enumerate(changes or ({}, {}))}
    found = {"at": 0.0, "processes": processes, "strays": [], "files": names(30), "shared_memory": names(2)}
    return Footprint(**{**found, **footprint})


def names(count: int) -> frozenset[str]:
    return frozenset(f"file{i}" for i in range(count))


def billed(**changes: float) -> Bills:
    """What is billed for some requests, and is in the books; changes: of the books."""
    answers = {"prompt_tokens": 100.0, "output_tokens": 50.0, "compute_seconds": 1.0}
    return Bills(answers, answers | changes)


def problems(after: Footprint, held: float = 0.0, bills: Bills | None = None, **visits: Any) -> list[str]:
    return Soak(at_rest(), after, (billed(), bills or billed()), held, Visits(**visits), Counter(), []).problems()


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


def test_books_that_differ_from_bills_and_bills_that_differ_from_earlier_ones_are_told():
    assert problems(at_rest(), bills=billed(compute_seconds=1.005)) == []
    assert problems(at_rest(), bills=billed(compute_seconds=1.1)) == [
        "compute_seconds: 1 are billed, and 1.1 are in the books"
    ]
    more = Bills({"prompt_tokens": 101.0}, {"prompt_tokens": 102.0})
    assert problems(at_rest(), bills=more) == [
        "prompt_tokens: 101 are billed, and 102 are in the books",
        "prompt_tokens: 100 were billed for the same requests, at the end 101",
    ]


@pytest.mark.parametrize("switch_roles", [False, True])
def test_a_server_that_is_soaked_has_a_valid_configuration(tmp_path, switch_roles):
    (model,) = AppConfig.model_validate(arguments(tmp_path, switch_roles)).models
    assert (model.decode.bounds, model.prefill.bounds) == ((2, 2), (2, 2))


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
