"""What a request's deltas tell of its way through the engine."""

import math

from engine.core.output import take_timelines
from tests.fake_runner import Harness


def told(timeline) -> list[str]:
    assert [event.at for event in timeline] == sorted(event.at for event in timeline)
    return [event.what for event in timeline]


def test_deltas_tell_of_each_request_when_it_was_preempted_and_went_on():
    h = Harness(num_blocks=12, max_model_len=48)
    h.add("a", list(range(1, 5)), max_tokens=20)
    h.add("b", list(range(25, 45)), max_tokens=20)
    h.run()
    lines = told(h.timelines["b"])
    assert lines[0] == "queued behind 1 others, with 20 prompt tokens"
    assert lines[1] == "to be computed here; 0 of 20 tokens are cached"
    assert lines[2] == "first token"
    assert lines[3].startswith("preempted because blocks ran out; ")
    assert lines[4].startswith("to be computed here; ") and not lines[4].endswith(" of 20 tokens are cached")
    assert lines[5:] == ["ended: length, 20 output tokens"]


def test_a_delta_tells_only_what_happened_since_the_one_before():
    h = Harness(num_blocks=12, max_model_len=48)
    h.add("a", [1, 2, 3], max_tokens=4)
    sizes: list[int] = []
    while h.scheduler.has_work:
        h.step()
        sizes += [len(h.timelines["a"]) - sum(sizes)] * (len(h.outputs["a"]) > len(sizes))
    assert sizes == [3, 0, 0, 1]


def test_requests_without_a_token_tell_their_timelines_when_asked_and_each_event_once():
    h = Harness(num_blocks=12, max_model_len=48)
    h.add("a", [1, 2, 3], max_tokens=4)
    assert take_timelines(h.scheduler.queue.live.values(), before=0.0) == []
    (event,) = take_timelines(h.scheduler.queue.live.values(), math.inf)
    assert told(event.delta.timeline) == ["queued behind 0 others, with 3 prompt tokens"]
    assert (event.delta.token_ids, event.delta.position, event.delta.finish_reason) == ([], 0, None)
    assert take_timelines(h.scheduler.queue.live.values(), math.inf) == []
    h.run()
    assert told(h.timelines["a"])[0] == "to be computed here; 0 of 3 tokens are cached"
