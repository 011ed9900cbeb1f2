"""Formats of all model families. A format's entry contains everything needed to parse, enforce and detect it.

Names are vLLM's; docs/tool_calls.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from deployments.openai.call_grammar import CallSyntax
from deployments.openai.formats.call_format import CallFormat, ReasoningFormat
from deployments.openai.parsers import harmony
from deployments.openai.parsers.reasoning.think import ReasoningTags
from deployments.openai.parsers.tools import gemma_call
from deployments.openai.parsers.tools.call_reader import NAME, CallReader
from deployments.openai.parsers.tools.gemma_call import GemmaCall
from deployments.openai.parsers.tools.json_call import JsonCall, NamedJsonCall
from deployments.openai.parsers.tools.marked_calls import CallMarkup, ToolSchemas
from deployments.openai.parsers.tools.pythonic_call import PythonicCall
from deployments.openai.parsers.tools.whole_calls import JsonCallsParser, PythonicCallsParser
from deployments.openai.parsers.tools.xml_call import XmlCall, XmlTags

Reader = Callable[[str, ToolSchemas], CallReader]


def _json(text: str, tools: ToolSchemas) -> CallReader:
    return JsonCall(None)


def _gemma(text: str, tools: ToolSchemas) -> CallReader:
    return GemmaCall(tools)


def _pythonic(text: str, tools: ToolSchemas) -> CallReader:
    return PythonicCall(tools)


def _named_json(head: str) -> Reader:
    return lambda text, tools: NamedJsonCall(head)


def _xml(
    *, opens: tuple[str, ...], call: str = "", closes: tuple[str, ...], inner: tuple[str, ...] = (), **tags: Any
) -> CallMarkup:
    """Return the markup of calls whose arguments are tagged texts. tags: fields of XmlTags."""
    next_call = (*opens, call) if call else opens
    after = tuple(close for close in closes if close != tags["call_end"])
    xml_tags = XmlTags(opens=next_call, closes=after, **tags)
    return CallMarkup(
        opens=opens, call=call, closes=closes, inner=inner, reader=lambda text, tools: XmlCall(xml_tags, tools)
    )


def _qwen3_xml(block: str) -> CallMarkup:
    return _xml(
        opens=(f"<{block}>",),
        call="<function=",
        closes=(f"</{block}>",),
        key="<parameter=",
        value_end="</parameter>",
        call_end="</function>",
        lines=True,
    )


def _mistral(text: str, tools: ToolSchemas) -> CallReader:
    """Read an object of a list, as models up to version 10 of Mistral's tokenizer write it, or a name followed by
    arguments."""
    return _json(text, tools) if text.startswith("{") else _MISTRAL_V11(text, tools)


_MISTRAL_V11 = _named_json(rf"\s*(?P<name>{NAME})\s*(\[CALL_ID]\w+)?(\[ARGS])?\s*")


def _thinks(*names: str) -> ReasoningFormat:
    return ReasoningFormat(names=names, markers=("</think>",), tags=ReasoningTags())


def _json_list(begin: str) -> CallSyntax:
    return CallSyntax(begin, "{object}", ",{gap}", "]")


HARMONY_REASONING = ReasoningFormat(names=("openai_gptoss",), markers=("<|channel|>analysis",), tags=None)
HARMONY = CallFormat(
    names=("openai",), example=harmony.EXAMPLE, more_markers=tuple(harmony.MARKERS), reasoning=HARMONY_REASONING
)
# if a chat template matches several, the first is used
FORMATS = (
    HARMONY,
    CallFormat(
        names=("seed_oss",),
        example=r"<seed:tool_call>\s*<function=example_function>",
        markup=_qwen3_xml("seed:tool_call"),
        syntax=CallSyntax(
            "",
            "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
            parameter="<parameter={key}>",
            value_end="</parameter>\n",
        ),
        reasoning=ReasoningFormat(
            names=("seed_oss",), markers=("</seed:think>",), tags=ReasoningTags(("<seed:think>",), ("</seed:think>",))
        ),
    ),
    CallFormat(
        names=("mistral",),
        example=r'\[TOOL_CALLS] ?(\[\{"name": ?"example_function"|example_function(\[CALL_ID]\w+)?(\[ARGS])?\{)',
        markup=CallMarkup(
            opens=("[TOOL_CALLS]",),
            closes=("]",),
            separator=",",
            skipped="[",
            reader=_mistral,
            inner=("[CALL_ID]", "[ARGS]"),
        ),
        syntax=CallSyntax("", "[TOOL_CALLS]{name}[ARGS]{arguments}"),
        older=("[ARGS]", _json_list("[TOOL_CALLS]{gap}[")),
        id_length=9,
        reasoning=ReasoningFormat(
            names=("mistral",), markers=("[/THINK]",), tags=ReasoningTags(("[THINK]",), ("[/THINK]",))
        ),
    ),
    CallFormat(
        names=("gemma4",),
        example=r"<\|tool_call>call:example_function\{",
        markup=CallMarkup(
            opens=("<|tool_call>",), closes=(gemma_call.CLOSE,), reader=_gemma, inner=(gemma_call.QUOTE,)
        ),
        reasoning=ReasoningFormat(
            names=("gemma4",),
            markers=("<|channel>thought",),
            tags=ReasoningTags(("<|channel>thought",), ("<channel|>",)),
        ),
    ),
    CallFormat(
        names=("granite",),
        example=r'<\|?tool_call\|?>\s*\[\{"name": ?"example_function"|<\|tool_call\|> followed by a JSON list',
        markup=CallMarkup(
            opens=("<|tool_call|>", "<tool_call>"), closes=("]",), separator=",", skipped="[", reader=_json
        ),
        syntax=_json_list("<|tool_call|>{gap}["),
        reasoning=ReasoningFormat(
            names=("granite",),
            markers=("my thought process:", "<response></response>"),
            tags=ReasoningTags(
                ("Here is my thought process:", "Here's my thought process:", "<think>"),
                ("Here is my response:", "Here's my response:", "</think>"),
                around_content=("<response>", "</response>"),  # Granite 3.3
            ),
        ),
    ),
    CallFormat(reasoning=_thinks("think", "qwen3", "deepseek_r1")),
    CallFormat(
        names=("hermes", "qwen3_json", "granite4"),
        example=r'<tool_call>\s*\{"name": ?"example_function", ?"arguments": ?\{"key": ?"value"}',
        markup=CallMarkup(
            opens=("<tool_call>",), closes=("]", "</tool_call>"), separator=",", skipped="[", reader=_json
        ),
        syntax=CallSyntax("", "<tool_call>{gap}{object}{gap}</tool_call>"),
    ),
    CallFormat(
        names=("deepseek_v3",),
        example="function<｜tool▁sep｜>example_function\n```json",
        markup=CallMarkup(
            opens=("<｜tool▁calls▁begin｜>",),
            call="<｜tool▁call▁begin｜>",
            closes=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            reader=_named_json(rf"\s*\w+<｜tool▁sep｜>(?P<name>{NAME})\s*```json\s*"),
            inner=("<｜tool▁sep｜>",),
        ),
        syntax=CallSyntax(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁calls▁end｜>",
        ),
        reasoning=_thinks("deepseek_v3"),
    ),
    CallFormat(
        names=("deepseek_v31",),
        example="<｜tool▁call▁begin｜>example_function<｜tool▁sep｜>",
        markup=CallMarkup(
            opens=("<｜tool▁calls▁begin｜>",),
            call="<｜tool▁call▁begin｜>",
            closes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            reader=_named_json(rf"\s*(?P<name>{NAME})<｜tool▁sep｜>\s*"),
            inner=("<｜tool▁sep｜>",),
        ),
        syntax=CallSyntax(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    CallFormat(
        names=("deepseek_v32", "deepseek_v4"),
        example='<｜DSML｜invoke name="example_function">',
        markup=_xml(
            opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
            call="<｜DSML｜invoke name=",
            closes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
            key="<｜DSML｜parameter name=",
            value_end="</｜DSML｜parameter>",
            call_end="</｜DSML｜invoke>",
            inner=("｜DSML｜",),
        ),
        syntax=CallSyntax(
            "<｜DSML｜function_calls>\n",
            '<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n',
            end="</｜DSML｜function_calls>",
            parameter='<｜DSML｜parameter name="{key}" string="{is_text}">',
            value_end="</｜DSML｜parameter>\n",
        ),
        reasoning=_thinks("deepseek_v4"),
    ),
    CallFormat(
        names=("kimi_k2",),
        example=r"<\|tool_call_begin\|>.{0,40}<\|tool_call_argument_begin\|>",
        markup=CallMarkup(
            opens=("<|tool_calls_section_begin|>",),
            call="<|tool_call_begin|>",
            closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            reader=_named_json(rf"\s*(?P<id>(functions\.)?(?P<name>{NAME}):\d+)\s*<\|tool_call_argument_begin\|>\s*"),
            inner=("<|tool_call_argument_begin|>",),
        ),
        syntax=CallSyntax(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
        ),
        reasoning=_thinks("kimi_k2"),
    ),
    CallFormat(
        names=("qwen3_coder", "qwen3_xml"),
        example=r"<tool_call>\s*<function=example_function>",
        markup=_qwen3_xml("tool_call"),
        syntax=CallSyntax(
            "",
            "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
            parameter="<parameter={key}>\n",
            value_end="\n</parameter>\n",
        ),
    ),
    CallFormat(
        names=("glm45", "glm47"),
        example=r"<tool_call>\s*example_function\s*<arg_key>key</arg_key>",
        markup=_xml(
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            name_end="<",
            key="<arg_key>",
            key_end="<arg_value>",
            value_end="</arg_value>",
            call_end="</tool_call>",
            inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        syntax=CallSyntax(
            "",
            "<tool_call>{name}\n{parameters}</tool_call>",
            parameter="<arg_key>{key}</arg_key>\n<arg_value>",
            value_end="</arg_value>\n",
        ),
        reasoning=_thinks("glm45", "glm47"),
    ),
    CallFormat(
        names=("minimax_m2",),
        example=r'<minimax:tool_call>\s*<invoke name="example_function">',
        markup=_xml(
            opens=("<minimax:tool_call>",),
            call="<invoke name=",
            closes=("</minimax:tool_call>",),
            key="<parameter name=",
            value_end="</parameter>",
            call_end="</invoke>",
        ),
        syntax=CallSyntax(
            "<minimax:tool_call>\n",
            '<invoke name="{name}">\n{parameters}</invoke>\n',
            end="</minimax:tool_call>",
            parameter='<parameter name="{key}">',
            value_end="</parameter>\n",
        ),
        reasoning=_thinks("minimax_m2"),
    ),
    CallFormat(
        names=("phi4_mini_json",),
        example=r'(functools|<\|tool_call\|>)\[\{"name": ?"example_function"',
        markup=CallMarkup(
            opens=("functools[", "<|tool_call|>"),
            closes=("]", "<|/tool_call|>"),
            separator=",",
            skipped="[",
            reader=_json,
        ),
        syntax=_json_list("functools["),
    ),
    CallFormat(
        names=("lfm2",),
        example=r"<\|tool_call_start\|>\[example_function\(",
        markup=CallMarkup(
            opens=("<|tool_call_start|>",),
            closes=("]", "<|tool_call_end|>"),
            separator=",",
            skipped="[",
            reader=_pythonic,
        ),
    ),
    CallFormat(
        names=("pythonic", "llama4_pythonic"),
        example=r"""\[example_function\(key=["']value["']\)]""",
        whole=PythonicCallsParser,
    ),
    CallFormat(
        names=("llama3_json", "llama4_json"),
        example=r'\s\{"name": ?"example_function", ?"parameters": ?\{"key": ?"value"}',
        whole=JsonCallsParser,
        whole_key="parameters",
    ),
)
CALL_FORMATS = {name: found for found in FORMATS for name in found.names}
"""Formats by `tool_call_parser` name."""
REASONING_FORMATS = {name: found.reasoning for found in FORMATS if found.reasoning for name in found.reasoning.names}
"""Formats by `reasoning_parser` name."""

# auto: detected from the chat template. none: all text is content.
if TYPE_CHECKING:
    ToolCallParserName = str
    ReasoningParserName = str
else:
    ToolCallParserName = Literal[("auto", "none", *sorted(CALL_FORMATS))]
    ReasoningParserName = Literal[("auto", "none", *sorted(REASONING_FORMATS))]
