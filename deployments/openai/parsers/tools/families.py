"""How each family of models writes calls between markers. The names are vLLM's; see docs/tool_calls.md."""

from __future__ import annotations

from collections.abc import Callable

from deployments.openai.parsers.tools import gemma_call
from deployments.openai.parsers.tools.call_reader import NAME, CallReader
from deployments.openai.parsers.tools.gemma_call import GemmaCall
from deployments.openai.parsers.tools.json_call import JsonCall, NamedJsonCall
from deployments.openai.parsers.tools.marked_calls import CallMarkup, ToolSchemas
from deployments.openai.parsers.tools.pythonic_call import PythonicCall
from deployments.openai.parsers.tools.xml_call import XmlCall, XmlTags

Reader = Callable[[str, ToolSchemas, bool], CallReader]


def _json(text: str, tools: ToolSchemas, streaming: bool) -> CallReader:
    return JsonCall(None, streaming=streaming)


def _gemma(text: str, tools: ToolSchemas, streaming: bool) -> CallReader:
    return GemmaCall(streaming=streaming)


def _pythonic(text: str, tools: ToolSchemas, streaming: bool) -> CallReader:
    return PythonicCall(tools, streaming=streaming)


def _named_json(head: str) -> Reader:
    return lambda text, tools, streaming: NamedJsonCall(head, streaming=streaming)


def _xml(tags: XmlTags) -> Reader:
    return lambda text, tools, streaming: XmlCall(tags, tools, streaming=streaming)


def _mistral(text: str, tools: ToolSchemas, streaming: bool) -> CallReader:
    """Read an object of a list, which models up to version 10 of Mistral's tokenizer write, or a name first."""
    return _json(text, tools, streaming) if text.startswith("{") else _MISTRAL_V11(text, tools, streaming)


_MISTRAL_V11 = _named_json(rf"\s*(?P<name>{NAME})\s*(\[CALL_ID]\w+)?(\[ARGS])?\s*")

HERMES = CallMarkup(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    reader=_json,
    example=r'<tool_call>\s*\{"name": ?"example_function", ?"arguments": ?\{"key": ?"value"}',
)
_MISTRAL = CallMarkup(
    opens=("[TOOL_CALLS]",),
    closes=("]",),
    separator=",",
    skipped="[",
    reader=_mistral,
    example=r'\[TOOL_CALLS] ?(\[\{"name": ?"example_function"|example_function(\[CALL_ID]\w+)?(\[ARGS])?\{)',
    inner=("[CALL_ID]", "[ARGS]"),
    ends_reasoning=True,
    id_length=9,
)
_DEEPSEEK_V3 = CallMarkup(
    opens=("<｜tool▁calls▁begin｜>",),
    call="<｜tool▁call▁begin｜>",
    closes=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    reader=_named_json(rf"\s*\w+<｜tool▁sep｜>(?P<name>{NAME})\s*```json\s*"),
    example="function<｜tool▁sep｜>example_function\n```json",
    inner=("<｜tool▁sep｜>",),
    ends_reasoning=True,
)
_DEEPSEEK_V31 = CallMarkup(
    opens=_DEEPSEEK_V3.opens,
    call=_DEEPSEEK_V3.call,
    closes=_DEEPSEEK_V3.closes[1:],
    reader=_named_json(rf"\s*(?P<name>{NAME})<｜tool▁sep｜>\s*"),
    example="<｜tool▁call▁begin｜>example_function<｜tool▁sep｜>",
    inner=("<｜tool▁sep｜>",),
    ends_reasoning=True,
)
_DEEPSEEK_V32 = CallMarkup(
    opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    call="<｜DSML｜invoke name=",
    closes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    reader=_xml(
        XmlTags(key="<｜DSML｜parameter name=", value_end="</｜DSML｜parameter>", call_end="</｜DSML｜invoke>")
    ),
    example='<｜DSML｜invoke name="example_function">',
    inner=("｜DSML｜",),
    ends_reasoning=True,
)
_KIMI_K2 = CallMarkup(
    opens=("<|tool_calls_section_begin|>",),
    call="<|tool_call_begin|>",
    closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    reader=_named_json(rf"\s*(?P<id>(functions\.)?(?P<name>{NAME}):\d+)\s*<\|tool_call_argument_begin\|>\s*"),
    example=r"<\|tool_call_begin\|>.{0,40}<\|tool_call_argument_begin\|>",
    inner=("<|tool_call_argument_begin|>",),
    ends_reasoning=True,
)
_QWEN3_XML = XmlTags(key="<parameter=", value_end="</parameter>", call_end="</function>", lines=True)
_QWEN3_CODER = CallMarkup(
    opens=("<tool_call>",),
    call="<function=",
    closes=("</tool_call>",),
    reader=_xml(_QWEN3_XML),
    example=r"<tool_call>\s*<function=example_function>",
)
_SEED_OSS = CallMarkup(
    opens=("<seed:tool_call>",),
    call="<function=",
    closes=("</seed:tool_call>",),
    reader=_xml(_QWEN3_XML),
    example=r"<seed:tool_call>\s*<function=example_function>",
)
_GLM = CallMarkup(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    reader=_xml(
        XmlTags(
            name_end="<",
            key="<arg_key>",
            key_end="<arg_value>",
            value_end="</arg_value>",
            call_end="</tool_call>",
        )
    ),
    example=r"<tool_call>\s*example_function\s*<arg_key>key</arg_key>",
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_MINIMAX_M2 = CallMarkup(
    opens=("<minimax:tool_call>",),
    call="<invoke name=",
    closes=("</minimax:tool_call>",),
    reader=_xml(XmlTags(key="<parameter name=", value_end="</parameter>", call_end="</invoke>")),
    example=r'<minimax:tool_call>\s*<invoke name="example_function">',
)
_GRANITE = CallMarkup(
    opens=("<|tool_call|>", "<tool_call>"),
    closes=("]",),
    separator=",",
    skipped="[",
    reader=_json,
    example=r'<\|?tool_call\|?>\s*\[\{"name": ?"example_function"|<\|tool_call\|> followed by a JSON list',
)
_PHI4_MINI = CallMarkup(
    opens=("functools[", "<|tool_call|>"),
    closes=("]", "<|/tool_call|>"),
    separator=",",
    skipped="[",
    reader=_json,
    example=r'(functools|<\|tool_call\|>)\[\{"name": ?"example_function"',
)
_GEMMA4 = CallMarkup(
    opens=("<|tool_call>",),
    closes=(gemma_call.CLOSE,),
    reader=_gemma,
    example=r"<\|tool_call>call:example_function\{",
    inner=(gemma_call.QUOTE,),
)
_LFM2 = CallMarkup(
    opens=("<|tool_call_start|>",),
    closes=("]", "<|tool_call_end|>"),
    separator=",",
    skipped="[",
    reader=_pythonic,
    example=r"<\|tool_call_start\|>\[example_function\(",
)

FAMILIES: dict[str, CallMarkup] = {
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "granite4": HERMES,
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _DEEPSEEK_V32,
    "deepseek_v4": _DEEPSEEK_V32,
    "kimi_k2": _KIMI_K2,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": _SEED_OSS,
    "glm45": _GLM,
    "glm47": _GLM,
    "minimax_m2": _MINIMAX_M2,
    "granite": _GRANITE,
    "phi4_mini_json": _PHI4_MINI,
    "gemma4": _GEMMA4,
    "lfm2": _LFM2,
}
