"""Valid calls of every format with one thing changed: an edit, a part that is missing or comes twice, text around."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from deployments.openai.formats.choice_parser import OutputFormat
from deployments.openai.formats.families import CALL_FORMATS
from deployments.openai.parsers.output_parser import CallArguments, CallStart, OutputEvent
from tests.deployments.openai.parsers.families import ARGS, FAMILIES, TOOLS, Family, now, weather
from tests.deployments.openai.parsers.reading import cut, read

LLAMA = Family(
    parser="llama3_json",
    text=f'{{"name": "get_weather", "parameters": {ARGS}}}; {{"name": "now", "parameters": {{}}}}',
    expected=[*weather(ARGS), *now()],
    hard="",
    malformed=[],
)
ALL = [*FAMILIES, LLAMA]
EXPECTED = [("get_weather", {"city": "Paris", "days": 2}), ("now", {})]
WORDS = re.compile(r"get_weather|now|city|Paris|days|2")
by_family = pytest.mark.parametrize("family", ALL, ids=lambda family: f"{family.parser}-{family.reasoning}")


def test_every_format_is_tried():
    assert {name for family in ALL for name in CALL_FORMATS if CALL_FORMATS[name] is CALL_FORMATS[family.parser]} == {
        *CALL_FORMATS
    }


def calls(events: list[OutputEvent]) -> list[tuple[str, Any]]:
    """Return names and arguments, decoded if they are JSON."""
    found: list[list[Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            found.append([event.name, ""])
        elif isinstance(event, CallArguments):
            found[-1][1] += event.text
    for call in found:
        try:
            call[1] = json.loads(call[1])
        except ValueError:
            continue
    return [(name, arguments) for name, arguments in found]


def check_streams(output_format: OutputFormat, text: str, random: Random) -> list[OutputEvent]:
    """Return the events of a text, which are the same however it is cut."""
    events = read(output_format, [text])
    assert read(output_format, [*text]) == events, text
    parts = cut(text, random.choices(range(len(text) + 1), k=random.randint(1, 12)))
    assert read(output_format, parts) == events, text
    return events


def edits(text: str, random: Random, count: int) -> Iterator[tuple[str, int, int]]:
    """Yield a text with one change, and the start and end of what was changed."""
    for _ in range(count):
        start = random.randrange(len(text))
        end = min(len(text), start + random.choice((1, 1, 1, 2, 4)))
        piece = text[start:end]
        match random.choice(("delete", "repeat", "replace", "insert", "swap")):
            case "delete":
                new = ""
            case "repeat":
                new = piece * 2
            case "replace":
                new = random.choice("<>{}[]()\"',:;=|/\\ \n")
            case "insert":
                new = random.choice("<>{}[]()\"',:;=|/\\ \n") + piece
            case _:
                new = piece[::-1]
        yield text[:start] + new + text[end:], start, end


def touches_a_word(text: str, start: int, end: int) -> bool:
    """Return whether an edit may have changed a name or a value: it is in one, or at its edge or quotes."""
    return any(start - 5 < word.end() and end + 5 > word.start() for word in WORDS.finditer(text))


@by_family
def test_an_edit_makes_no_other_call_of_a_valid_one_and_streams_like_the_whole(family: Family):
    random = Random(1)
    is_tagged = "</" in family.text.replace("</think>", "").replace("</tool_call>", "") and family.parser != "granite"
    for text, start, end in edits(family.text, random, 100):
        events = check_streams(family.format, text, random)
        if touches_a_word(family.text, start, end) or is_tagged:  # a damaged tag may be a part of a value in tags
            continue
        for name, arguments in calls(events):
            assert (name, arguments) in EXPECTED or not isinstance(arguments, dict) or name not in TOOLS, text


def harmless(family: Family) -> Iterator[str]:
    """Yield texts in which the same calls are written a little differently."""
    text, markup = family.text, CALL_FORMATS[family.parser].markup
    yield from (text + "\n", text + " \n\n", text.replace("}, {", "},\n{"), text.replace('": ', '":  '))
    if family.parser != "openai":
        yield from (f"{text}\nDone.", f"{text} [1] {{x}}")
    if family.reasoning == "none":
        yield from (f"Sure.\n{text}", f"\n\n{text}", f"See [1] {{x}}: {text}")
    for close in () if markup is None else markup.closes:
        places = [place.start() for place in re.finditer(re.escape(close), text) if len(close) > 1]
        for place in places:
            yield text[:place] + text[place + len(close) :]  # it is missing
            yield text[:place] + close + text[place:]  # it comes twice
    for opener in () if markup is None else markup.opens:
        if family.text.count(opener):
            yield text.replace(opener, opener + "\n" if opener.endswith(">") else opener)
            yield text.replace(opener, opener + opener, 1)


@by_family
def test_calls_written_a_little_differently_are_the_same_calls(family: Family):
    random, tried = Random(2), 0
    for text in harmless(family):
        events = check_streams(family.format, text, random)
        found = [(name, arguments) for name, arguments in calls(events)]
        assert found == EXPECTED, text
        tried += 1
    assert tried >= 4


@by_family
def test_calls_that_are_cut_off_are_never_other_calls(family: Family):
    random = Random(3)
    for end in range(len(family.text)):
        for reason in ("length", "stop"):
            events = read(family.format, [family.text[:end]], reason=reason)
            parts = cut(family.text[:end], random.choices(range(end + 1), k=5))
            assert read(family.format, parts, reason=reason) == events
        for name, arguments in calls(read(family.format, [family.text[:end]], reason="length")):
            assert (name, arguments) in EXPECTED or not isinstance(arguments, dict), family.text[:end]
            assert name in TOOLS
