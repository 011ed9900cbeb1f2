import json

import pytest

from cluster.cli.bench.openai_client import ChunkParser, RequestResult, StreamFailed, error_message


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def text(content: str) -> bytes:
    return event(json.dumps({"choices": [{"index": 0, "text": content, "finish_reason": None}]}))


ROLE = event('{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}')
CHAT = event('{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}')
LAST = event('{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}')
USAGE = event('{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}')
DONE = event("[DONE]")


def receive(*arrivals: tuple[bytes, float]) -> RequestResult:
    """A request sent at 10 s."""
    outcome, parser = RequestResult(sent_at=10.0), ChunkParser()
    for data, now in arrivals:
        for chunk in parser.feed(data):
            outcome.add(chunk, now)
    parser.close()
    return outcome


def test_times_run_from_sending_to_the_first_text_between_texts_and_to_the_end():
    outcome = receive((text("a"), 10.5), (text("b"), 10.75), (text("c"), 11.75), (LAST + USAGE + DONE, 12.5))
    assert (outcome.ttft_s, outcome.itl_s, outcome.e2el_s) == (0.5, [0.25, 1.0], 2.5)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.has_usage) == (5, 9, True)
    assert outcome.tpot_s == (2.5 - 0.5) / 8


def test_a_chunk_with_only_a_role_is_no_first_token():
    outcome = receive((ROLE, 10.1), (CHAT, 11.0), (CHAT, 11.5), (LAST + DONE, 11.5))
    assert (outcome.ttft_s, outcome.itl_s) == (1.0, [0.5])


def test_reasoning_is_text():
    reasoning = event('{"choices": [{"delta": {"reasoning_content": "hm"}}]}')
    assert receive((reasoning, 10.25), (CHAT, 11.0), (DONE, 11.0)).ttft_s == 0.25


def test_events_may_arrive_in_any_pieces():
    whole = text("a").replace(b"\n", b"\r\n") + b": comment\n\n" + text("b") + LAST + USAGE + DONE
    outcome = receive(*((whole[i : i + 1], 10.0 + i) for i in range(len(whole))))
    assert len(outcome.itl_s) == 1
    assert outcome.output_tokens == 9


def test_without_usage_chunks_are_counted():
    outcome = receive((text("a"), 11.0), (text("b"), 12.0), (LAST + DONE, 13.0))
    assert (outcome.output_tokens, outcome.prompt_tokens, outcome.has_usage) == (2, None, False)


def test_an_answer_without_text_shows_at_its_end():
    outcome = receive((LAST + DONE, 13.0))
    assert (outcome.ttft_s, outcome.e2el_s, outcome.tpot_s) == (3.0, 3.0, None)


def test_usage_that_is_null_until_the_end_is_none():
    chunk = event('{"choices": [{"text": "a"}], "usage": null}')
    assert not receive((chunk, 11.0), (DONE, 11.0)).has_usage


@pytest.mark.parametrize(
    ("arrival", "message"),
    [
        (text("a"), "ended early"),
        (event('{"error": {"message": "no memory", "code": 500}}'), "no memory"),
        (event('{"error": "no luck"}'), "no luck"),
        (event("<html>"), "not a chunk .* <html>"),
        (event('{"choices": 3}'), "not a chunk"),
        (b"", "ended early"),
    ],
)
def test_a_stream_that_does_not_end_well_has_failed(arrival, message):
    with pytest.raises(StreamFailed, match=message):
        receive((arrival, 11.0))


def test_errors_are_one_short_line():
    assert error_message(b'{"error": {"message": "a\\n  b"}}') == "a b"
    assert error_message(b"<html>\nBad Gateway</html>") == "<html> Bad Gateway</html>"
    assert len(error_message(b"x" * 10_000)) < 250
