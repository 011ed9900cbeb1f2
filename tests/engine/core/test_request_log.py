from itertools import count

from engine.core.request_log import MAX_LINES, MAX_REQUESTS, RequestLog
from tests.fake_runner import Harness


def journal() -> RequestLog:
    """Its clock goes on by a second with every line."""
    return RequestLog(clock=count(1).__next__)


def test_the_lines_of_a_request_come_in_the_order_in_which_they_were_written():
    lines = journal()
    lines.add("a", "accepted")
    lines.add("b", "accepted")
    lines.add("a", "received")
    assert lines.of(["a", "unknown"]) == {"a": [(1, "accepted"), (3, "received")]}


def test_of_many_requests_those_with_the_oldest_news_are_forgotten():
    lines = journal()
    for number in range(MAX_REQUESTS):
        lines.add(f"r{number}", "accepted")
    lines.add("r0", "received")
    lines.add("one more", "accepted")
    found = lines.of(["r0", "r1", "r2"])
    assert {name: len(told) for name, told in found.items()} == {"r0": 2, "r2": 1}


def test_a_request_without_end_does_not_fill_the_journal():
    lines = journal()
    for _ in range(2 * MAX_LINES):
        lines.add("a", "again")
    assert len(lines.of(["a"])["a"]) == MAX_LINES


def test_the_scheduler_tells_of_each_request_when_it_was_preempted_and_went_on():
    lines = journal()
    h = Harness(num_blocks=12, max_model_len=48, journal=lines)
    h.add("a", list(range(1, 5)), max_tokens=20)
    h.add("b", list(range(25, 45)), max_tokens=20)
    h.run()
    told = [line for _, line in lines.of(["b"])["b"]]
    assert told[0] == "queued behind 1 others, with 20 prompt tokens"
    assert told[1] == "to be computed here; 0 of 20 tokens are cached"
    assert told[2] == "first token"
    assert told[3].startswith("preempted, since blocks ran out; ")
    assert told[4].startswith("to be computed here; ") and not told[4].endswith(" of 20 tokens are cached")
    assert told[5:] == ["ended: length, 20 output tokens"]
