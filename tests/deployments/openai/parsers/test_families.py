"""The formats of all families of models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.openai.formats.choice_parser import ChoiceParser, OutputFormat
from deployments.openai.formats.families import CALL_FORMATS, REASONING_FORMATS, ReasoningParserName, ToolCallParserName
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, OutputEvent, Reasoning
from engine.text.text_stream import TextChunk
from tests.deployments.openai.parsers.families import FAMILIES, HARD, HARD_JSON, TOOLS, Family, weather
from tests.deployments.openai.parsers.reading import call, cut, read, whole
from tests.examples import examples

by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
XML = [family for family in FAMILIES if family.parser in ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32")]


def test_every_configured_name_has_a_parser_and_stands_in_the_documentation():
    page = (Path(__file__).parents[4] / "docs" / "tool_calls.md").read_text()
    for key, names, formats in (
        ("tool_call_parser", get_args(ToolCallParserName), CALL_FORMATS),
        ("reasoning_parser", get_args(ReasoningParserName), REASONING_FORMATS),
    ):
        assert set(names) == {"auto", "none", *formats}
        table = page.partition(f"| `{key}` | ")[2].partition("\n\n")[0]
        rows = [row.split(" | ")[0] for row in table.splitlines()[2:]]
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(formats)


@by_family
def test_published_examples_are_read_whole_and_however_they_are_cut(family: Family):
    assert whole(family.format, family.text) == family.expected
    for text in (family.text, family.hard, *family.malformed):
        streamed = read(family.format, [text])
        assert read(family.format, [*text]) == streamed
        for edge in range(len(text)):
            assert read(family.format, cut(text, [edge])) == streamed
    assert read(family.format, [*family.text]) == family.expected


@by_family
def test_braces_quotes_line_breaks_and_tags_inside_of_arguments_end_nothing(family: Family):
    for events in (whole(family.format, family.hard), read(family.format, [*family.hard])):
        start, arguments = events
        assert start == CallStart("get_weather", family.id)
        assert isinstance(arguments, CallArguments)
        assert json.loads(arguments.text) == {"city": HARD}


@by_family
def test_what_is_no_call_stays_content(family: Family):
    for text in family.malformed:
        assert whole(family.format, text) == read(family.format, [*text]) == [Content(text)]


@by_family
def test_text_around_calls_is_content(family: Family):
    if family.parser in ("openai", "llama4_pythonic"):
        pytest.skip("there is nothing around the calls")
    events = whole(family.format, f"{family.hard}\nand {family.hard} so on")
    assert [event.text for event in events if isinstance(event, Content)] == ["\nand", " so on"]
    assert sum(isinstance(event, CallStart) for event in events) == 2


@by_family
def test_only_the_first_call_counts_if_calls_must_not_be_parallel(family: Family):
    single = OutputFormat(tool_calls=family.parser, tools=TOOLS, reasoning=family.reasoning, parallel=False)
    assert whole(single, family.text) == read(single, [*family.text]) == family.expected[:-2]


@by_family
def test_call_that_max_tokens_cuts_off_is_content_or_a_call_without_end(family: Family):
    """At every character. Nothing that is sent is taken back, and nothing is lost but markup."""
    complete = whole(family.format, family.hard)[-1].text
    for end in range(1, len(family.hard)):
        text = family.hard[:end]
        events = read(family.format, [text], reason="length")
        assert read(family.format, [*text], reason="length") == events
        if not any(isinstance(event, CallStart) for event in events) and family.parser != "openai":
            assert "".join(event.text for event in events) == text
        sent = "".join(event.text for event in events if isinstance(event, CallArguments))
        if family.parser != "gemma4":  # whose arguments come whole, or as the model wrote them
            assert complete.startswith(sent)


@settings(max_examples=examples(100))
@given(data=st.data())
def test_how_outputs_are_cut_does_not_matter(data):
    check_cuts(data, num_cuttings=2)


@pytest.mark.slow
@settings(max_examples=examples(1000))
@given(data=st.data())
def test_how_outputs_are_cut_does_not_matter_ten_thousand_times(data):
    check_cuts(data, num_cuttings=10)


def check_cuts(data: st.DataObject, num_cuttings: int) -> None:
    """Cut an output of fragments of a family's markup and text at random places."""
    family = data.draw(st.sampled_from(FAMILIES))
    texts = [family.text, family.hard, *family.malformed]
    markup = [*CALL_FORMATS[family.parser].markers, "[", "now(", ")"]
    pieces = st.one_of(
        st.sampled_from(texts),
        st.builds(lambda text, ends: text[min(ends) : max(ends)], st.sampled_from(texts), st.tuples(*[ends] * 2)),
        st.sampled_from([*markup, "{", "}", '"', "\n", " ", "now", "<", '{"name": "now", "arguments": {}}']),
        st.text(max_size=4),
    )
    text = data.draw(st.lists(pieces, max_size=5).map("".join))
    expected = read(family.format, [text])
    random = Random(data.draw(st.integers(0, 2**32)))
    for _ in range(num_cuttings):
        parts = cut(text, random.choices(range(len(text) + 1), k=random.randint(1, 12)))
        assert read(family.format, parts) == expected


ends = st.integers(0, 200)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("days", "3", "3"),
        ("days", "three", '"three"'),
        ("hourly", "True", "true"),
        ("units", "null", "null"),
        ("units", "12", '"12"'),
        ("at", '{"lat": 1.5}', '{"lat": 1.5}'),
        ("at", "{'lat': None}", '{"lat": null}'),
        ("tags", '["a", "b"]', '["a", "b"]'),
        ("tags", "['a', \"b'\"]", '["a", "b\'"]'),
        ("tags", "[" * 5000, json.dumps("[" * 5000)),
        ("city", "12", '"12"'),
        ("city", "", '""'),
        ("unknown", "12", '"12"'),
    ],
)
def test_arguments_in_tags_get_the_types_of_their_schema(key, text, expected):
    output = f"<tool_call><function=get_weather><parameter={key}>{text}</parameter></function></tool_call>"
    output_format = OutputFormat(tool_calls="qwen3_coder", tools=TOOLS)
    assert whole(output_format, output) == read(output_format, [*output]) == weather(f'{{"{key}": {expected}}}')


def test_texts_in_tags_are_streamed_as_they_come():
    parser = ChoiceParser(OutputFormat(tool_calls="glm45", tools=TOOLS))
    head = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
    events = [
        parser.add(TextChunk(text, [0], [0], None, None)) for text in (head, "Par", "is", "</arg_va", "x and so on")
    ]
    assert events[0] == call("get_weather", '{"city": "')
    assert events[1:] == [[CallArguments("Par")], [CallArguments("is")], [], [CallArguments("</arg_vax and so on")]]


@pytest.mark.parametrize("family", XML, ids=lambda family: family.parser)
def test_text_between_the_tags_of_a_call_is_no_part_of_its_arguments(family: Family):
    city = family.text.index("Paris")
    end = family.text.index(">", family.text.index("</", city)) + 1
    text = f"{family.text[:end]} oops {family.text[end:]}"
    assert whole(family.format, text) == read(family.format, [*text]) == family.expected


def test_ids_have_the_length_that_the_chat_template_asks_for():
    family = next(family for family in FAMILIES if family.parser == "mistral")
    output_format = OutputFormat(tool_calls="mistral", tools=TOOLS, id_length=9)
    starts = [event for event in whole(output_format, family.text) if isinstance(event, CallStart)]
    assert len({start.id for start in starts}) == 2
    assert all(start.id is not None and len(start.id) == 9 and start.id.isalnum() for start in starts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>a<|return|>", [Content("a")]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
            [Reasoning("a\nb")],
        ),
        ("<|channel|>commentary to=python <|message|>a<|end|>", [Reasoning("a")]),
        ("<|channel|>commentary to=now<|message|><|call|>", call("now", "{}")),
        ("<|channel|>final <|constrain|>json<|message|>{}", [Content("{}")]),
        ("plain", [Content("plain")]),
        ("<|channel|>" + "x" * 500, [Content("<|channel|>" + "x" * 500)]),
    ],
)
def test_channels_of_harmony(text: str, expected: list[OutputEvent]):
    output_format = OutputFormat(tool_calls="openai", tools=TOOLS, reasoning="openai_gptoss")
    assert whole(output_format, text) == read(output_format, [*text]) == expected


def test_all_messages_of_the_analysis_channel_count_as_reasoning():
    parser = ChoiceParser(OutputFormat(tool_calls="openai", reasoning="openai_gptoss"))
    tokens = ["<|channel|>", "analysis", "<|message|>", "a", " b", "<|end|>", "<|start|>", "assistant"]
    tokens = [*tokens, "<|channel|>", "analysis", "<|message|>", "c", "<|end|>"]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    for token, offset in zip(tokens, offsets, strict=True):
        parser.add(TextChunk(token, [0], [offset], None, None))
    assert parser.reasoning_tokens == 3


@by_family
def test_reading_a_long_argument_piece_by_piece_takes_time_linear_in_its_length(family: Family):
    """Counts the characters that the parsers look at: those that they hold while they are given one more."""
    long = "x" * 5_000
    text = family.hard
    for written in (HARD, repr(HARD)[1:-1], HARD_JSON[10:-2]):
        text = text.replace(written, long)
    assert long in text
    parser = ChoiceParser(family.format)
    held = 0
    for char in text:
        parser.add(TextChunk(char, [0], [0], None, None))
        held += sum(len(part._buffer) for part in parts_of(parser))
    assert held < 100 * len(text)


def parts_of(parser: ChoiceParser) -> list[object]:
    parts: list[object] = [*parser._parsers]
    return parts + [part._call for part in parts if hasattr(part, "_call")]
