"""Streams that are gone on with from any event, though their tokens come in other groups the second time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.billing.prices import FREE
from deployments.jobs.delta_log import DeltaLog, LoggedGeneration
from deployments.jobs.errors import AnswerDiverged
from deployments.jobs.event_ids import ChoicePosition, EventIds, Position, parse_event_id
from engine.errors import InvalidParameter
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta
from tests.examples import examples

STREAM = "0123456789abcdef" * 2
PLAIN = SamplingParams()
DONE = (-1, 0, 0, 1, 1, True)
Event = tuple[int, int, int, int, int, bool]  # choice, first and last token, number in its group, their count, ended
FRONTEND = cast(
    Any,
    SimpleNamespace(
        tokenizer=SimpleNamespace(token_bytes=lambda i: bytes([i]), is_special=lambda i: False), prices=FREE
    ),
)


@st.composite
def deltas(draw: st.DrawFn, outputs: list[list[int]], reason: Any = "length") -> list[tuple[int, TokenDelta]]:
    """The tokens of all choices in some groups and some order, and the end with a token or, unless it is one, apart."""
    left: list[list[TokenDelta]] = []
    for tokens in outputs:
        apart = reason == "length" and draw(st.booleans())
        cuts = sorted(draw(st.sets(st.integers(1, len(tokens) - 1)))) if len(tokens) > 1 else []
        bounds = [0, *cuts, len(tokens)]
        parts = [TokenDelta(request_id="", position=a, token_ids=tokens[a:b]) for a, b in pairwise(bounds)]
        end = TokenDelta(request_id="", position=len(tokens), finish_reason=reason)
        if apart:
            parts.append(end)
        else:
            last = parts[-1]
            parts[-1] = TokenDelta(
                request_id="", position=last.position, token_ids=last.token_ids, finish_reason=reason
            )
        left.append(parts)
    order = draw(st.permutations([i for i, parts in enumerate(left) for _ in parts]))
    return [(i, left[i].pop(0)) for i in order]


async def read(
    deltas: list[tuple[int, TokenDelta]], num: int, known: Position | None, params: SamplingParams = PLAIN
) -> list[tuple[str, Event]]:
    """The events of a stream with their ids. A token, or the end, makes one to three."""
    prompts = [[GenerateRequest(request_id=str(i), prompt=[1], params=params) for i in range(num)]]
    log, ids = DeltaLog(), EventIds(STREAM, num, known)
    for entry in deltas:
        log.add(entry)
    log.end()
    events = list[tuple[str, Event]]()
    first = ids.next()  # some streams begin before the first token
    if first is not None:
        events.append((first.decode(), (0, 0, 0, 1, 1, False)))
    begins = [0] * num
    async for chunk in LoggedGeneration(FRONTEND, prompts, log, ids).chunks():
        begin, begins[chunk.index] = begins[chunk.index], begins[chunk.index] + len(chunk.token_ids)
        end, ended = begins[chunk.index], chunk.finish_reason is not None
        count = 1 + (begin + end) % 3
        for i in range(count):
            numbered = SimpleNamespace(sequence_number=0)
            if (line := ids.next(numbered)) is not None:
                assert numbered.sequence_number == len(events) + (0 if known is None else known.number + 1)
                events.append((line.decode(), (chunk.index, begin, end, i + 1, count, ended)))
    if (line := ids.next()) is not None:  # as [DONE] is
        events.append((line.decode(), DONE))
    return events


def check_whole(events: list[Event], outputs: list[list[int]]) -> None:
    """Every token is in one group, and every group has all its events, in their order."""
    assert events.pop(0) == (0, 0, 0, 1, 1, False) and events.pop() == DONE and DONE not in events
    for choice, tokens in enumerate(outputs):
        place, next_in_group, ended = 0, 1, False
        for _, begin, end, number, count, last in [event for event in events if event[0] == choice]:
            assert (begin, number) == (place, next_in_group) and not (ended and number == 1) and end <= begin + 1
            next_in_group = 1 if number == count else number + 1
            place, ended = (end, last) if number == count else (place, ended)
        assert (place, next_in_group, ended) == (len(tokens), 1, True)


outputs_of = st.lists(st.lists(st.integers(65, 90), min_size=1, max_size=8), min_size=1, max_size=3)


@settings(max_examples=examples(400))
@given(st.data())
def test_a_stream_that_is_gone_on_with_has_every_event_once_whatever_groups_its_tokens_come_in(data):
    outputs, reason = data.draw(outputs_of), data.draw(st.sampled_from(["length", "stop"]))
    events = asyncio.run(read(data.draw(deltas(outputs, reason)), len(outputs), None))
    for _ in range(3):  # connections that break
        kept = data.draw(st.integers(1, len(events)))
        line = events[kept - 1][0]
        stream, known = parse_event_id(line.removeprefix("id: ").removesuffix("\n"))
        assert stream == STREAM
        more = asyncio.run(read(data.draw(deltas(outputs, reason)), len(outputs), known))
        events = events[:kept] + more
        check_whole([event for _, event in events], outputs)


@settings(max_examples=examples(400))
@given(st.data())
def test_a_single_other_token_ends_the_stream_before_anything_is_sent_of_that_choice(data):
    tokens = data.draw(st.lists(st.integers(65, 90), min_size=1, max_size=8))
    events = asyncio.run(read(data.draw(deltas([tokens])), 1, None))
    _, known = parse_event_id(data.draw(st.sampled_from(events[1:]))[0][4:-1])
    wrong = data.draw(st.integers(0, known.choices[0].tokens - 1))
    other = [*tokens[:wrong], tokens[wrong] + 1, *tokens[wrong + 1 :]]
    shorter = tokens[: known.choices[0].tokens - 1]
    for given_tokens in (other, shorter):
        if given_tokens:
            with pytest.raises(AnswerDiverged, match=f"first {known.choices[0].tokens} tokens"):
                asyncio.run(read(data.draw(deltas([given_tokens])), 1, known))


def test_an_answer_that_goes_on_where_its_client_saw_the_end_has_diverged():
    events = asyncio.run(read([(0, TokenDelta(request_id="", token_ids=[65], finish_reason="length"))], 1, None))
    _, known = parse_event_id(events[-1][0][4:-1])
    longer = [(0, TokenDelta(request_id="", token_ids=[65, 66], finish_reason="length"))]
    with pytest.raises(AnswerDiverged):
        asyncio.run(read(longer, 1, known))


def test_an_end_that_came_with_the_last_token_does_not_come_again_when_it_is_apart_from_it():
    def delta(position: int, tokens: list[int], finish_reason: str | None = None) -> tuple[int, TokenDelta]:
        return 0, TokenDelta(request_id="", position=position, token_ids=tokens, finish_reason=finish_reason)

    events = asyncio.run(read([delta(0, [65]), delta(1, [66, 67], "length")], 1, None))
    _, known = parse_event_id(events[-1][0][4:-1])
    assert asyncio.run(read([delta(0, [65, 66, 67]), delta(3, [], "length")], 1, known)) == []


@settings(max_examples=examples(50))
@given(st.lists(st.integers(65, 90), max_size=6), st.data())
def test_a_stream_that_ended_at_a_stop_string_is_resumed_from_each_of_its_events(tokens, data):
    outputs = [[*tokens, 33, 34], [65]]

    def events_of(known: Position | None) -> list[tuple[str, Event]]:
        return asyncio.run(read(data.draw(deltas(outputs)), 2, known, SamplingParams(stop=["!"])))

    events = events_of(None)
    for kept in range(1, len(events) + 1):
        _, known = parse_event_id(events[kept - 1][0][4:-1])
        rest = events_of(known)
        assert sorted(event for _, event in events[:kept] + rest) == sorted(event for _, event in events)


@given(st.integers(0, 999), st.integers(1, 9), st.lists(st.integers(65, 90)), st.booleans())
def test_an_id_says_what_it_was_made_of(number, in_group, tokens, ended):
    choices = (ChoicePosition().after(tokens, ended), ChoicePosition())
    position = Position(number, 0, in_group, choices)
    assert parse_event_id(f"{STREAM}:{position}") == (STREAM, position)


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        "17",
        f"{STREAM}:",
        f"{STREAM}:0.1.1.0-00000000",
        f"{STREAM}:0.0.1.0-00000001",
        f"{STREAM}:0.0.1.1-0",
        f"{STREAM}:0.0.1." + ",".join(["1-00000000"] * 17),
        "x" * 2000,
    ],
)
def test_what_is_no_id_of_this_server_is_refused(event_id):
    with pytest.raises(InvalidParameter, match="Last-Event-ID must be the id of an event"):
        parse_event_id(event_id)
