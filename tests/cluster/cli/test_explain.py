"""`manta explain`: how a timeline is told to people, and what is said without one. tests/serve has real ones."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from cluster.cli.bench.openai_client import fetch
from cluster.cli.explain import show, summary_of
from deployments.errors import InvalidApiKey, NotPermitted, RequestNotFound
from deployments.observability.timeline import RequestTimeline, SequenceTimeline
from engine.errors import EngineUnavailable, RequestError
from engine.wire.timeline import TimelineEvent

TIMELINE = SequenceTimeline(
    request_id="chatcmpl-a-1-0",
    model="pocket",
    prompt_tokens=71,
    arrived_at=1000.0,
    state="ended",
    reason="stop",
    cached_tokens=16,
    output_tokens=21,
    preemptions=1,
    replays=1,
    engines=["decode-1", "decode-2"],
    admission_s=0.0,
    queue_s=0.001,
    prefill_s=0.012,
    first_token_s=0.02,
    seconds=0.22,
    events=[
        TimelineEvent(1000.0, "ingress-1", "the request came"),
        TimelineEvent(1000.0214, "decode-1", "first [bold]token"),
    ],
)


def test_summary_has_all_figures_of_a_request_that_has_ended():
    assert summary_of(TIMELINE) == [
        ("request", "chatcmpl-a-1-0"),
        ("model", "pocket"),
        ("state", "ended after 0.220 s: stop"),
        ("prompt", "71 tokens, 16 of them from the prefix cache"),
        ("waited", "0.000 s for admission, 0.001 s in the engine's queue, 0.012 s for the first token after that"),
        ("output", "21 tokens, the first after 0.020 s, then one every 10.0 ms"),
        ("engines", "decode-1, decode-2"),
        ("replays", "1"),
        ("preemptions", "1"),
    ]


def test_summary_of_a_request_that_waits_leaves_out_what_is_not_known_yet():
    timeline = SequenceTimeline(request_id="cmpl-a-1-0", model="pocket", prompt_tokens=5, arrived_at=0.0)
    assert summary_of(timeline) == [
        ("request", "cmpl-a-1-0"),
        ("model", "pocket"),
        ("state", "waits for its first token"),
        ("prompt", "5 tokens"),
        ("output", "0 tokens"),
    ]


def test_moments_are_told_in_seconds_since_the_request_came_and_word_for_word():
    console = Console(width=100, record=True, markup=False)
    with console.capture() as shown:
        show(msgspec.json.encode(RequestTimeline("a", [TIMELINE])), console)
    lines = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert "+0.000 ingress-1 the request came" in lines
    assert "+0.021 decode-1 first [bold]token" in lines


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (
            404,
            '{"error": {"message": "", "type": "not_found_error"}}',
            RequestNotFound,
            "is unknown",
        ),
        (404, '{"detail": "Not Found"}', RequestError, "is not a Manta server"),
        (401, '{"error": {"message": "who are you?"}}', InvalidApiKey, "who are you?"),
        (403, '{"error": {"message": "only keys of ingress.admin_keys"}}', NotPermitted, "admin_keys"),
        (503, "", EngineUnavailable, "answers 503"),
    ],
)
def test_what_a_server_answers_in_place_of_a_timeline_is_one_clear_error(server, status, body, error, message):
    url, answers = server
    answers["/debug/requests/a%2Fb%3F"] = status, body.encode()
    with pytest.raises(error, match=message):
        fetch(url, "/debug/requests", None, "a/b?")


def test_where_there_is_no_server_it_is_said(server):
    with pytest.raises(EngineUnavailable, match=r"no server answers at http://127\.0\.0\.1:9: connection refused"):
        fetch("http://127.0.0.1:9", "/debug/tape", None)
