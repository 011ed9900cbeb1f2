"""Calls that are not written as their format demands, but mean one thing only."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.openai.formats.choice_parser import OutputFormat
from deployments.openai.formats.families import CALL_FORMATS
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, OutputEvent, Reasoning
from tests.deployments.openai.parsers.reading import read

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "on": {"type": "boolean"},
    "at": {"type": "object"},
}
TOOLS: dict[str, dict[str, Any]] = {
    "write": {"type": "object", "properties": PROPERTIES},
    "now": {"type": "object", "properties": {}},
    "list-files": {"type": "object", "properties": {"from": {"type": "string"}, "user-id": {"type": "integer"}}},
    "maps.find": {},
}


def contents(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def calls(events: list[OutputEvent]) -> list[tuple[str, Any]]:
    """Return names and decoded arguments."""
    found: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            found.append([event.name, ""])
        elif isinstance(event, CallArguments):
            found[-1][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in found]


def check(parser: str, text: str, expected: list[tuple[str, Any]], content: str = "") -> None:
    output_format = OutputFormat(tool_calls=parser, tools=TOOLS)
    events = read(output_format, [text])
    assert (calls(events), contents(events)) == (expected, content)
    assert read(output_format, [*text]) == events


def python(text: str, arguments: dict[str, Any], name: str = "write") -> Any:
    return pytest.param(text, name, arguments, id=text)


PYTHON = [
    python('list-files(from="a")', {"from": "a"}, "list-files"),
    python('list-files(**{"from": "a", "n": 1}, user="b")', {"from": "a", "n": 1, "user": "b"}, "list-files"),
    python("list-files(user-id=7, from='b')", {"user-id": 7, "from": "b"}, "list-files"),
    python("maps.find(class=1, in=[2], lambda=None)", {"class": 1, "in": [2], "lambda": None}, "maps.find"),
    python("write(text='a\nb')", {"text": "a\nb"}),
    python("write(\n  text = 'a',\n  n = 1,\n)", {"text": "a", "n": 1}),
    python("write(text='''a\n'b' \"c\"''')", {"text": "a\n'b' \"c\""}),
    python(r"write(text='C:\Users\new\x.txt')", {"text": r"C:\Users\new\x.txt"}),
    python(r'write(text="C:\temp\new file.txt")', {"text": r"C:\temp\new file.txt"}),
    python(r"write(text='C:\\Users\\new')", {"text": r"C:\Users\new"}),
    python(r"write(text='\\server\share\new')", {"text": r"\\server\share\new"}),
    python(r"write(text='copy C:\Users\new D:\test')", {"text": r"copy C:\Users\new D:\test"}),
    python(r"write(text=r'\d+\n')", {"text": r"\d+\n"}),
    python(r"write(text='\d+\t\x41é\ud83c\udf0d')", {"text": "\\d+\tAé\U0001f30d"}),
    python(r"write(text='C:\Users\me\', n=1)", {"text": "C:\\Users\\me\\", "n": 1}),
    python(r"write(text='a\'b', n=-1)", {"text": "a'b", "n": -1}),
    python("write(text='sed -n '1,9p' f.py')", {"text": "sed -n '1,9p' f.py"}),
    python('write(text="it is "fine", n=2)', {"text": 'it is "fine', "n": 2}),
    python("write(text='grep \"]\" (', n=07)", {"text": 'grep "]" (', "n": 7}),
    python("write(at={'a': (1, 2.5), 'b': {3}, 4: true})", {"at": {"a": [1, 2.5], "b": [3], "4": True}}),
    python("write(text='', at={}, n=1_000)", {"text": "", "at": {}, "n": 1000}),
    python("write(text='a\x00b')", {"text": "a\x00b"}),
]


@pytest.mark.parametrize(("text", "name", "arguments"), PYTHON)
def test_python_that_python_would_not_read(text: str, name: str, arguments: dict[str, Any]):
    for parser, output in (("pythonic", f"[{text}]"), ("lfm2", f"<|tool_call_start|>[{text}]<|tool_call_end|>")):
        check(parser, output, [(name, arguments)])
        check(parser, output.replace(text, f"{text}, now()"), [(name, arguments), ("now", {})])


@pytest.mark.parametrize("bad", ["write(text=b'z')", "write(text=a)", "write(1)", "now(x=1e999)"])
def test_call_that_cannot_be_read_harms_no_other_in_its_list(bad: str):
    good = "list-files(from='a')"
    expected = [("list-files", {"from": "a"})]
    check("pythonic", f"[{bad}, {good}]", expected, f"[{bad}")
    check("pythonic", f"[{good}, {bad}, {good}]", expected * 2, f", {bad}")
    check("lfm2", f"<|tool_call_start|>[{bad}, {good}]<|tool_call_end|>", expected, f"<|tool_call_start|>[{bad}")
    check("lfm2", f"<|tool_call_start|>[{good}, {bad} , {good}]<|tool_call_end|>", expected * 2, f", {bad}")
    check("granite", '<|tool_call|>[{"name": 1}, {"name": "now"}]', [("now", {})], '<|tool_call|>[{"name": 1}')


TEXTS = [
    "<a>CLOSE</a>",
    "CLOSE",
    "a\nCLOSE\nb CLOSE",
    "a END b",
    "a END\nBLOCK b",
    "a BLOCK b",
    "a KEY b",
    "CLOSE\nx END",
]


@dataclass(frozen=True)
class Tagged:
    """How a family writes arguments in tags."""

    parser: str
    begin: str
    key: str  #: of one argument, with KEY for its name
    close: str
    end: str
    block: str
    after: str = ""  #: what stands around values

    def call(self, *values: tuple[str, str], end: str | None = None) -> str:
        written = [f"{self.key.replace('KEY', key)}{self.after}{value}{self.after}" for key, value in values]
        joined = f"{self.close}\n".join(written)
        return (
            f"{self.begin}{joined}{self.close}\n{self.end}\n{self.block}"
            if end is None
            else f"{self.begin}{joined}{end}"
        )


TAGGED = [
    Tagged(
        "qwen3_coder",
        "<tool_call>\n<function=write>\n",
        "<parameter=KEY>",
        "</parameter>",
        "</function>",
        "</tool_call>",
        "\n",
    ),
    Tagged(
        "seed_oss",
        "<seed:tool_call>\n<function=write>\n",
        "<parameter=KEY>",
        "</parameter>",
        "</function>",
        "</seed:tool_call>",
    ),
    Tagged("glm45", "<tool_call>write\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>", ""),
    Tagged(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="write">\n',
        '<parameter name="KEY">',
        "</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
    ),
    Tagged(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n',
        '<｜DSML｜parameter name="KEY" string="true">',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "</｜DSML｜function_calls>",
    ),
]
by_family = pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.parser)


@by_family
@pytest.mark.parametrize("text", TEXTS)
def test_value_in_tags_may_contain_tags(family: Tagged, text: str):
    for word, tag in (("CLOSE", family.close), ("END", family.end), ("BLOCK", family.block), ("KEY", family.key)):
        text = text.replace(word, tag)
    check(family.parser, family.call(("text", text)), [("write", {"text": text})])
    if "KEY" not in text:
        check(family.parser, family.call(("n", "1"), ("text", text)), [("write", {"n": 1, "text": text})])


@by_family
def test_tags_may_be_missing(family: Tagged):
    close = family.close
    both = [("write", {"text": "ab", "n": 5})]
    call = family.call(("text", "ab"), ("n", "5"))
    check(family.parser, call.replace(close, "", 1), both)
    check(
        family.parser,
        family.call(("n", "5"), ("text", "ab")).replace(close, "", 1),
        [("write", {"n": 5, "text": "ab"})],
    )
    for end in (
        f"\n{family.end}\n{family.block}",
        f"{close}\n{family.block}",
        f"{close}\n{family.end}",
        f"{close}\n",
        close,
    ):
        check(family.parser, family.call(("text", "ab"), ("n", "5"), end=end), both)
    check(family.parser, call.partition("\n")[2] if family.parser != "glm45" else call, both)
    check(family.parser, family.begin.partition("\n")[0] + "\n" + call if family.parser != "glm45" else call, both)
    assert read(
        OutputFormat(tool_calls=family.parser, tools=TOOLS), [family.call(("text", "ab"), end="")], reason="length"
    )[-1] == CallArguments('{"text": "ab')


@by_family
def test_arguments_in_tags_may_be_one_object(family: Tagged):
    written = '{"text": "ab", "n": 5}'
    for key in ("arguments", "input", "parameters"):
        check(family.parser, family.call((key, written)), [("write", {"text": "ab", "n": 5})])
        check(family.parser, family.call((key, '{"other": 1}')), [("write", {key: {"other": 1}})])
    if family.parser != "glm45":
        text = f"{family.begin}{written}\n{family.end}\n{family.block}"
        check(family.parser, text, [("write", {"text": "ab", "n": 5})])


@pytest.mark.parametrize(
    ("key", "is_text", "value", "expected"),
    [
        ("n", "true", "5", 5),
        ("text", "false", "5", "5"),
        ("text", "true", "5", "5"),
        ("on", "true", "True", True),
        ("at", "true", '{"a": 1}', {"a": 1}),
        ("unknown", "true", "5", "5"),
        ("unknown", "false", "5", 5),
        ("unknown", "false", "five", "five"),
    ],
)
def test_type_of_a_schema_counts_more_than_the_one_that_deepseek_writes(key, is_text, value, expected):
    text = (
        f'<｜DSML｜invoke name="write"><｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>'
    )
    check("deepseek_v32", f"{text}</｜DSML｜invoke>", [("write", {key: expected})])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (r'"{\"text\": \"a\"}"', {"text": "a"}),
        ("null", {}),
        ('""', {}),
        ('{"text": "a\nb\tc"}', {"text": "a\nb\tc"}),
        (r'{"text": "C:\Users\new"}', {"text": r"C:\Users\new"}),
        (r'{"text": "C:\\Users\\new"}', {"text": r"C:\Users\new"}),
        (r'{"text": "\d+ \"a\" \u00e9\u00"}', {"text": r'\d+ "a" é\u00'}),
        ('{"at": {"a": [1, 2', {"at": {"a": [1, 2]}}),
        ('{"text": "a", "n": 1', {"text": "a", "n": 1}),
        ('{"text": "a"}}}', {"text": "a"}),
    ],
)
def test_arguments_that_are_no_json_or_no_object(written: str, arguments: dict[str, Any]):
    name = '"name": "write"'
    for parser in ("hermes", "granite4", "qwen3_json"):
        for call in (f'{{{name}, "arguments": {written}}}', f'[{{{name}, "arguments": {written}}}]'):
            check(parser, f"<tool_call>\n{call}\n</tool_call>", [("write", arguments)])
    check("hermes", f'<tool_call>{{{name}, "arguments": {written}', [("write", arguments)])
    check(
        "hermes", f'<tool_call><tool_call>{{{name}, "arguments": {written}}}</tool_call>.', [("write", arguments)], "."
    )
    check("granite", f'<|tool_call|>[{{{name}, "arguments": {written}}}]', [("write", arguments)])
    check("phi4_mini_json", f'functools[{{{name}, "arguments": {written}}}]', [("write", arguments)])
    if written.startswith("{"):
        check(
            "deepseek_v31",
            f"<｜tool▁call▁begin｜>write<｜tool▁sep｜>{written}<｜tool▁call▁end｜>",
            [("write", arguments)],
        )
        check("mistral", f"[TOOL_CALLS]write[ARGS]{written}", [("write", arguments)])


def test_path_whose_first_backslash_is_an_escape_stays_as_the_model_wrote_it():
    text = r'<tool_call>{"name": "write", "arguments": {"text": "C:\temp\Users"}}</tool_call>'
    events = read(OutputFormat(tool_calls="hermes", tools=TOOLS), [*text])
    assert events[-1] == CallArguments(r'{"text": "C:\temp\Users"}')


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("text:New York, USA,n:3", {"text": "New York, USA", "n": 3}),
        ("text:12,n:3,on:True", {"text": "12", "n": 3, "on": True}),
        ('text:"a, b",n:3', {"text": "a, b", "n": 3}),
        ("text:it's 5 o'clock,n:3", {"text": "it's 5 o'clock", "n": 3}),
        ("text:https://a.b/c?d=1:2,e,n:3", {"text": "https://a.b/c?d=1:2,e", "n": 3}),
        ("at:{a:x y,b:[1,z w,true,null]},n:3", {"at": {"a": "x y", "b": [1, "z w", True, None]}, "n": 3}),
        ('<|"|>text<|"|>:<|"|>a<tool_call|>b<|"|>', {"text": "a<tool_call|>b"}),
        ('text: <|"|>a<|"|>, n: 3,', {"text": "a", "n": 3}),
        ("unknown:007,text:", {"unknown": "007", "text": ""}),
    ],
)
def test_values_of_gemma_without_quotes(written: str, arguments: dict[str, Any]):
    for head in ("call:write", "call: write", ":write"):
        check("gemma4", f"<|tool_call>{head}{{{written}}}<tool_call|>", [("write", arguments)])
    check("gemma4", f"<|tool_call>call:write{{{written}}}", [("write", arguments)])


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("llama3_json", '{"name": "write", "parameters": {"text": "a"}}'),
        ("llama3_json", '[{"name": "write", "arguments": {"text": "a"}}]'),
        ("pythonic", '[write(text="a")]'),
    ],
)
def test_text_around_calls_without_markers_is_content(parser: str, call: str):
    expected = [("write", {"text": "a"})]
    check(parser, f"Sure, [1] {{as you like}}: {call} Done.", expected, "Sure, [1] {as you like}: Done.")
    check(parser, f"```\n{call}\n```", expected, "```\n```")
    check(parser, f"{call}\n\n{call}", expected * 2)
    check(parser, f"{call} and {call}, then [x", expected * 2, " and, then [x")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"calls": [{"name": "write", "parameters": {}}]}'),
        ("llama3_json", 'See ["a", {"name": "write", "parameters": {}}] and \\" {'),
        ("llama3_json", '{"name": "other", "parameters": {"name": "write", "parameters": {}}} ['),
        ("llama3_json", '{"name": "write", "city": "Paris"}'),
        ("hermes", '<tool_call>{"name": "write", "city": "Paris"}</tool_call>'),
        ("hermes", "Use <tool_call> and </tool_call>."),
        ("pythonic", "See [write] and [write](x) or [now(1)], [wr"),
        ("lfm2", "Use <|tool_call_start|> for [write(text=a)]"),
        ("qwen3_coder", "Use <tool_call> with <function= and so on"),
    ],
)
def test_texts_that_only_resemble_calls_are_content(parser: str, text: str):
    check(parser, text, [], text)


THINKING = [
    ("hermes", "qwen3", '<tool_call>\n{"name": "write", "arguments": {"text": "a"}}\n</tool_call>'),
    (
        "qwen3_coder",
        "qwen3",
        "<tool_call>\n<function=write>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
    ),
    ("glm45", "glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"),
    ("minimax_m2", "minimax_m2", TAGGED[3].call(("text", "a"))),
    ("deepseek_v32", "think", TAGGED[4].call(("text", "a"))),
    (
        "deepseek_v31",
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"text": "a"}<｜tool▁call▁end｜>',
    ),
    (
        "kimi_k2",
        "kimi_k2",
        '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"text": "a"}<|tool_call_end|>',
    ),
    ("granite", "granite", '<|tool_call|>[{"name": "write", "arguments": {"text": "a"}}]'),
    ("lfm2", "think", "<|tool_call_start|>[write(text='a')]<|tool_call_end|>"),
    ("phi4_mini_json", "think", 'functools[{"name": "write", "arguments": {"text": "a"}}]'),
]


@pytest.mark.parametrize(("parser", "reasoning", "call"), THINKING, ids=lambda value: value[:12])
def test_call_ends_reasoning_that_lacks_its_closing_tag(parser: str, reasoning: str, call: str):
    expected = [("write", {"text": "a"})]
    for begun in (False, True):
        output_format = OutputFormat(tool_calls=parser, tools=TOOLS, reasoning=reasoning, reasoning_begun=begun)
        marker = next(opener for opener in CALL_FORMATS[parser].markers if call.startswith(opener))
        thought = f"I may use {marker} or {call.replace('write', 'other')[:-3]} here.\n\nSo I call."
        for after, content in (("", ""), ("\n</think>\n\n", ""), ("\n</think>\n\nDone.", "Done."), (f"\n{call}", "")):
            text = f"<think>\n{thought}\n\n{call}{after}"
            events = read(output_format, [text])
            assert events[0] == Reasoning(thought)
            assert calls(events) == expected * text.count(call)
            assert contents(events) == content
            assert read(output_format, [*text]) == events


def test_reasoning_before_a_forced_call_only_ends_with_its_tag():
    output_format = OutputFormat(
        tool_calls="qwen3_coder", tools=TOOLS, reasoning="qwen3", reasoning_begun=True, forced=True
    )
    call = TAGGED[0].call(("text", "a"))
    assert read(output_format, [f"{call}\n</think>\n\n{call}"]) == [
        Reasoning(call),
        CallStart("write"),
        CallArguments('{"text": "a"}'),
    ]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>\n<response>\nb\n</response>", "a", "b"),
        ("<think>\na\n</think><response>b</response>\n", "a", "b\n"),
        ("<response>b", "", "b"),
        ("<think>a</think>b <response>", "a", "b <response>"),
        ("<think>a</think><resp", "a", "<resp"),
        ("Here is my thought process: a Here is my response: <response>b</response>", " a ", "b"),
    ],
)
def test_granite_writes_its_answer_in_tags(text: str, reasoning: str, content: str):
    output_format = OutputFormat(reasoning="granite")
    events = read(output_format, [text])
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == reasoning
    assert contents(events) == content
    assert read(output_format, [*text]) == events


ENDLESS = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "'),
    ("hermes", '<tool_call>{"arguments": "'),
    ("qwen3_coder", "<function=write><parameter=text>\n"),
    ("qwen3_coder", "</parameter>x"),
    ("lfm2", '<|tool_call_start|>[write(text="'),
    ("gemma4", "<|tool_call>"),
    ("gemma4", '<|tool_call>call:write{text:<|"|>'),
]


@pytest.mark.parametrize(("parser", "unit"), ENDLESS)
def test_calls_that_begin_again_and_again_take_time_linear_in_their_length(parser: str, unit: str):
    """Counts the lines of Python that run, which no other work on the machine changes."""

    def lines(length: int) -> int:
        text, count = "<function=write><parameter=text>" * (parser == "qwen3_coder") + unit * (length // len(unit)), 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += 1
            return trace

        output_format = OutputFormat(tool_calls=parser, tools=TOOLS, reasoning="think", reasoning_begun=True)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            read(output_format, [text])
        finally:
            sys.settrace(before)
        return count

    assert lines(4_000) < 3 * lines(2_000)
