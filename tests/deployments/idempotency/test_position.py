"""Streams that are gone on with from any event, though their tokens come in other groups the second time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.idempotency.errors import AnswerDiverged
from deployments.idempotency.position import ChoicePosition, EventIds, Position, parse_event_id
from deployments.idempotency.tape import Tape, TapedGeneration
from engine.errors import InvalidParameter
from engine.wire.messages import GenerateRequest, TokenDelta
from engine.wire.sampling_params import SamplingParams
from tests.examples import examples

STREAM = "0123456789abcdef" * 2
Event = tuple[int, int, int, int, int, bool]  # choice, first and last token, number in its group, their count, ended
FRONTEND = cast(
    Any, SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=lambda i: bytes([i]), is_special=lambda i: False))
)


@st.composite
def deltas(draw: st.DrawFn, outputs: list[list[int]], end_apart: list[bool]) -> list[tuple[int, TokenDelta]]:
    """The tokens of all choices in some groups and some order. end_apart: the end comes without a token."""
    left: list[list[TokenDelta]] = []
    for tokens, apart in zip(outputs, end_apart, strict=True):
        cuts = sorted(draw(st.sets(st.integers(1, len(tokens) - 1)))) if len(tokens) > 1 else []
        bounds = [0, *cuts, len(tokens)]
        parts = [TokenDelta(request_id="", position=a, token_ids=tokens[a:b]) for a, b in pairwise(bounds)]
        end = TokenDelta(request_id="", position=len(tokens), finish_reason="length")
        if apart:
            parts.append(end)
        else:
            last = parts[-1]
            parts[-1] = TokenDelta(
                request_id="", position=last.position, token_ids=last.token_ids, finish_reason="length"
            )
        left.append(parts)
    order = draw(st.permutations([i for i, parts in enumerate(left) for _ in parts]))
    return [(i, left[i].pop(0)) for i in order]


async def read(tape: list[tuple[int, TokenDelta]], num: int, known: Position | None) -> list[tuple[str, Event]]:
    """The events of a stream with their ids. A group makes one to three."""
    prompts = [[GenerateRequest(request_id=str(i), prompt=[1], params=SamplingParams()) for i in range(num)]]
    played, ids = Tape(), EventIds(STREAM, num, known)
    for choice, delta in tape:
        played.add(choice, delta)
    played.end()
    counts, events = [0] * num, list[tuple[str, Event]]()
    first = ids.next()  # some streams begin before the first token
    if first is not None:
        events.append((first.decode(), (0, 0, 0, 1, 1, False)))
    async for chunk in TapedGeneration(FRONTEND, prompts, played, ids).chunks():
        begin = counts[chunk.index]
        end = counts[chunk.index] = begin + len(chunk.token_ids)
        count = 1 + (begin + end) % 3
        for i in range(count):
            if (line := ids.next()) is not None:
                assert ids.number == len(events) + 1 + (0 if known is None else known.number + 1)
                ended = chunk.finish_reason is not None
                events.append((line.decode(), (chunk.index, begin, end, i + 1, count, ended)))
    return events


def check_whole(events: list[Event], outputs: list[list[int]]) -> None:
    """Every token is in one group, and every group has all its events, in their order."""
    assert events.pop(0) == (0, 0, 0, 1, 1, False)
    for choice, tokens in enumerate(outputs):
        place, next_in_group, ended = 0, 1, False
        for _, begin, end, number, count, last in [event for event in events if event[0] == choice]:
            assert (begin, number) == (place, next_in_group) and not (ended and number == 1)
            next_in_group = 1 if number == count else number + 1
            place, ended = (end, last) if number == count else (place, ended)
        assert (place, next_in_group, ended) == (len(tokens), 1, True)


outputs_of = st.lists(st.lists(st.integers(65, 90), min_size=1, max_size=8), min_size=1, max_size=3)


@settings(max_examples=examples(400))
@given(st.data())
def test_a_stream_that_is_gone_on_with_has_every_event_once_whatever_groups_its_tokens_come_in(data):
    outputs = data.draw(outputs_of)
    apart = [data.draw(st.booleans()) for _ in outputs]
    events = asyncio.run(read(data.draw(deltas(outputs, apart)), len(outputs), None))
    for _ in range(3):  # connections that break
        kept = data.draw(st.integers(1, len(events)))
        line = events[kept - 1][0]
        stream, known = parse_event_id(line.removeprefix("id: ").removesuffix("\n"))
        assert stream == STREAM
        more = asyncio.run(read(data.draw(deltas(outputs, apart)), len(outputs), known))
        events = events[:kept] + more
        check_whole([event for _, event in events], outputs)


@settings(max_examples=examples(400))
@given(st.data())
def test_a_single_other_token_ends_the_stream_before_anything_is_sent_of_that_choice(data):
    tokens = data.draw(st.lists(st.integers(65, 90), min_size=1, max_size=8))
    events = asyncio.run(read(data.draw(deltas([tokens], [False])), 1, None))
    _, known = parse_event_id(data.draw(st.sampled_from(events[1:]))[0][4:-1])
    wrong = data.draw(st.integers(0, known.choices[0].tokens - 1))
    other = [*tokens[:wrong], tokens[wrong] + 1, *tokens[wrong + 1 :]]
    shorter = tokens[: known.choices[0].tokens - 1]
    for given_tokens in (other, shorter):
        if given_tokens:
            with pytest.raises(AnswerDiverged, match=f"first {known.choices[0].tokens} tokens"):
                asyncio.run(read(data.draw(deltas([given_tokens], [False])), 1, known))


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


@given(st.integers(0, 999), st.integers(1, 9), st.lists(st.integers(65, 90)), st.booleans())
def test_an_id_says_what_it_was_made_of(number, in_group, tokens, ended):
    choices = (ChoicePosition().after(tokens, ended), ChoicePosition())
    position = Position(number, in_group, 0, len(tokens), choices)
    assert parse_event_id(f"{STREAM}:{position}") == (STREAM, position)


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        "17",
        f"{STREAM}:",
        f"{STREAM}:0.1.1.0.0-00000000",
        f"{STREAM}:0.1.0.2.1-00000000",
        f"{STREAM}:0.1.0.1.1-0",
        f"{STREAM}:0.1.0.1." + ",".join(["1-00000000"] * 17),
        "x" * 2000,
    ],
)
def test_what_is_no_id_of_this_server_is_refused(event_id):
    with pytest.raises(InvalidParameter, match="Last-Event-ID must be the id of an event"):
        parse_event_id(event_id)
