from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.openai.formats.choice_parser import ChoiceParser, OutputFormat
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, Reasoning
from engine.text.text_stream import TextChunk
from tests.deployments.openai.parsers.reading import call, cut, joined, read, whole
from tests.examples import examples

TOOLS: dict[str, dict[str, Any]] = {"f": {}, "g": {}}
F: dict[str, dict[str, Any]] = {"f": {}}
HERMES = OutputFormat(tool_calls="hermes", tools=TOOLS, reasoning="think")
LLAMA = OutputFormat(tool_calls="llama3_json", tools=TOOLS)
REQUIRED = OutputFormat(tool_calls="json", tools=TOOLS, reasoning="think", reasoning_begun=True)
NAMED = OutputFormat(tool_calls="arguments", tools=F, named=True, reasoning="think")
FORMATS = [HERMES, LLAMA, REQUIRED, NAMED]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


# what models write, whole and in pieces, so that examples come near to all that the parsers decide on
FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            *("<think>", "</think>", "\n", "\n\n", " ", "<tool_call>", "</tool_call>", "<", "<tool", "</th", "{", "}"),
            *("[", "]", ",", ";", ":", '"', "\\", '"name"', '"arguments"', '"parameters"', '"f"', '{"name": "f", '),
            *('"arguments": {', '"parameters": {"a": "}<\\""}}', CALL, '{"name": "g", "parameters": {"b": [1, {}]}}'),
            *('{"arguments": {"a": 1}, "name": "f"}', '{"name": "other", "parameters": {}}', '{"title": "x"}', "text"),
        ]
    ),
    st.text(max_size=4),
)
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)


@settings(max_examples=examples(400))
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=12),
    output_format=st.sampled_from(FORMATS),
)
def test_how_a_text_is_cut_into_chunks_does_not_matter(text, cuts, output_format):
    parts = cut(text, cuts)
    assert read(output_format, parts) == read(output_format, [text])
    assert read(output_format, [*text, ""]) == read(output_format, [text])


@settings(max_examples=examples(200))
@given(text=TEXTS, output_format=st.sampled_from(FORMATS))
def test_no_text_is_lost_but_white_space_tags_and_what_stands_around_arguments(text, output_format):
    events = read(output_format, [text])
    if output_format.tool_calls == "json":  # nothing but calls can come: what is none was cut off, and is dropped
        assert not any(isinstance(event, Content) for event in events)
        return
    kept = "".join(event.name if isinstance(event, CallStart) else event.text for event in events)
    if not any(isinstance(event, CallStart) for event in events):
        for tag in ("<think>", "</think>"):
            kept, text = kept.replace(tag, ""), text.replace(tag, "")
        assert "".join(kept.split()) == "".join(text.split())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)


@settings(max_examples=examples(200))
@given(
    calls=st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), min_size=1, max_size=3),
    before=st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8),
    output_format=st.sampled_from([HERMES, LLAMA, REQUIRED]),
    ascii_only=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    swapped=st.booleans(),
)
def test_calls_are_read_back_in_a_stream_and_whole(calls, before, output_format, ascii_only, indent, swapped):
    key = "parameters" if output_format is LLAMA else "arguments"
    objects = [
        {key: arguments, "name": name} if swapped else {"name": name, key: arguments} for name, arguments in calls
    ]
    texts = [json.dumps(value, ensure_ascii=ascii_only, indent=indent) for value in objects]
    match output_format.tool_calls:
        case "hermes":
            text = before + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        case "llama3_json":
            text = "; ".join(texts)
        case _:
            text = f"thoughts</think>[{', '.join(texts)}]"
    events = whole(output_format, text)
    assert read(output_format, [*text]) == events
    starts = [i for i, event in enumerate(events) if isinstance(event, CallStart)]
    assert [(events[i].name, json.loads(events[i + 1].text)) for i in starts] == calls
    rest = [event for event in events if not isinstance(event, CallStart | CallArguments)]
    if output_format is HERMES:
        assert "".join(event.text for event in rest) == before.rstrip()


def test_text_around_calls_is_content_and_arguments_are_as_the_model_wrote_them():
    text = f'I will look.\n{CALL}\n<tool_call>{{"name": "g", "arguments": {{ "b" : [] }}}}</tool_call>\nDone.'
    expected = [Content("I will look."), *call("f", '{"a": 1}'), *call("g", '{ "b" : [] }'), Content("\nDone.")]
    assert whole(HERMES, text) == read(HERMES, [*text]) == expected


def test_tags_inside_of_strings_of_arguments_end_nothing():
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\"}"}}</tool_call>'
    assert whole(HERMES, text) == read(HERMES, [*text]) == call("f", '{"a": "</tool_call>\\"}"}')


@pytest.mark.parametrize("space", ["", "\n", " \n\n"])
def test_white_space_around_calls_is_no_content(space):
    text = f"{space}{CALL}{space}{CALL}{space}"
    assert whole(HERMES, text) == read(HERMES, [*text]) == call("f", '{"a": 1}') * 2


def test_call_that_lacks_its_last_brace_ends_at_the_closing_tag():
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> b'
    assert whole(HERMES, text) == read(HERMES, [*text]) == [*call("f", '{"a": 1}'), Content(" b")]


def test_name_is_streamed_before_the_arguments_and_these_as_they_come():
    parser = ChoiceParser(HERMES)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "long text'
    events = [parser.add(TextChunk(char, [0], [i], None, None)) for i, char in enumerate(text)]
    begun = text.index('{"a"')
    assert [event for found in events[:begun] for event in found] == []
    assert events[begun] == call("f", "{")
    assert events[begun + 1 :] == [[CallArguments(char)] for char in text[begun + 1 :]]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "a <tool_call>no JSON</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call> b',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
        '<tool_call>{"function": "f"}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>" + '{"name": ' + "[" * 5000,
        '  {"name": "other", "parameters": {"a": 1}}',
        '{"title": "not a call", "parameters": {}}',
        '["a", {"name": "f", "parameters": {}}]',
        '{"name": "f", "parameters": 3} and more',
    ],
)
def test_what_is_no_call_stays_content(text):
    output_format = HERMES if "<tool_call>" in text else LLAMA
    assert whole(output_format, text) == read(output_format, [*text]) == [Content(text)]


@pytest.mark.parametrize("arguments", ['{"a": tru}', "{'a': 1}", '{"a": 1,}', '{"a": "b}'])
def test_arguments_that_cannot_be_read_are_passed_on_as_the_model_wrote_them(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}'
    events = read(HERMES, [text], reason="length")
    assert read(HERMES, [*text], reason="length") == events == call("f", arguments)


def test_answer_in_json_is_not_held_back_until_its_end():
    parser = ChoiceParser(LLAMA)
    events = [parser.add(TextChunk(text, [0], [0], None, None)) for text in ('{"tit', 'le": ', '"a long text')]
    assert joined([event for found in events for event in found]) == [Content('{"title": "a long text')]


def test_call_without_arguments_is_a_call():
    assert whole(HERMES, '<tool_call>{"name": "f"}</tool_call>') == call("f", "{}")


def test_only_the_first_call_counts_if_calls_must_not_be_parallel():
    output_format = OutputFormat(tool_calls="hermes", tools=F, parallel=False)
    text = f"{CALL}\n{CALL} and more"
    assert whole(output_format, text) == read(output_format, [*text]) == [*call("f", '{"a": 1}'), Content(" and more")]


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\na\nb\n</think>\n\nanswer", False, [Reasoning("a\nb"), Content("answer")]),
        ("a\nb\n</think>\n\nanswer", True, [Reasoning("a\nb"), Content("answer")]),
        ("<think>a</think>answer", True, [Reasoning("a"), Content("answer")]),
        ("\n<think>never closed\n", False, [Reasoning("never closed")]),
        ("<think></think>", False, []),
        (" <thin", False, [Content(" <thin")]),
        ("answer <think>a</think>", False, [Content("answer <think>a</think>")]),
        ("a</th</think>x", True, [Reasoning("a</th"), Content("x")]),
    ],
)
def test_reasoning_is_what_stands_between_the_tags(text, begun, expected):
    output_format = OutputFormat(tool_calls="hermes", tools=F, reasoning="think", reasoning_begun=begun)
    assert whole(output_format, text) == read(output_format, [*text]) == expected


def test_tags_are_not_counted_as_tokens_of_reasoning():
    parser = ChoiceParser(HERMES)
    tokens = ["<think>", "\n", "a", " b", "</think>", "\n\n", "answer"]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    parser.add(TextChunk("".join(tokens[:4]), [0] * 4, offsets[:4], None, None))
    assert parser.reasoning_tokens == 3
    parser.add(TextChunk("".join(tokens[4:]), [0] * 3, offsets[4:], None, None, "stop"))
    assert parser.reasoning_tokens == 3


def test_reasoning_can_be_left_out():
    output_format = OutputFormat(reasoning="think", include_reasoning=False)
    assert whole(output_format, "<think>a</think>b") == read(output_format, [*"<think>a</think>b"]) == [Content("b")]


@pytest.mark.parametrize("text", ["[", '[{"na', '[{"name": "f", "argum', '[{"name": "f", "arguments": {"a": 1'])
def test_forced_call_that_max_tokens_cuts_off_is_no_content(text):
    events = read(OutputFormat(tool_calls="json", tools=F), [text], reason="length")
    assert not any(isinstance(event, Content) for event in events)
