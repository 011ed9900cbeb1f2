"""Format in which a model writes tool calls and reasoning, from its configuration or detected from its chat
template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deployments.openai.call_grammar import Lark
from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import NamedToolChoice
from deployments.openai.formats.call_format import CallFormat
from deployments.openai.formats.choice_parser import OutputFormat
from deployments.openai.formats.families import CALL_FORMATS, FORMATS, HARMONY, HARMONY_REASONING, REASONING_FORMATS
from deployments.openai.formats.tool_grammar import Thinking, ToolGrammar
from deployments.openai.parsers.reasoning.think import ReasoningTags
from engine.errors import RequestError
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.structured_outputs import StructuredOutputsParams

_QUESTION = {"role": "user", "content": "?"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "example_function",
        "description": "An example.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_ARGUMENTS = {"key": "value"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "example_function", "arguments": _ARGUMENTS}}
    ],
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    tool_call_parser: str
    """Name of the format of tool calls; `none` if unknown."""
    reasoning_parser: str
    """Name of the format of reasoning; `none` if the model writes none."""
    shows_tools: bool
    """Whether the chat template puts tools into the prompt."""
    closed: bool = True
    """Whether objects in schemas are closed as in SchemaBuilder."""

    @classmethod
    def of(
        cls,
        tokenizer: ChatTokenizer,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        *,
        closed: bool = True,
    ) -> ChatFormat:
        example = tokenizer.example([_QUESTION, _CALL], [_TOOL])
        without_call = tokenizer.example([_QUESTION], [_TOOL])
        name = _TOOL["function"]["name"]
        shows_tools = name in without_call
        template = tokenizer.template_for([_TOOL]) or ""
        if tool_call_parser == "auto":
            # the model will write calls as the template writes those of earlier turns
            calls = (found.names[0] for found in FORMATS if re.search(found.example, example))
            writes_calls = not shows_tools or example.count(name) > without_call.count(name)
            tool_call_parser = next(calls, "none" if writes_calls else _format_with_tokens(tokenizer))
        if reasoning_parser == "auto":
            reasoning = (
                found.names[0] for found in REASONING_FORMATS.values() if any(map(template.__contains__, found.markers))
            )
            reasoning_parser = next(reasoning, "none")
        if tool_call_parser in HARMONY.names or reasoning_parser in HARMONY_REASONING.names:  # one format for both
            tool_call_parser, reasoning_parser = HARMONY.names[0], HARMONY_REASONING.names[0]
        return cls(tool_call_parser, reasoning_parser, shows_tools, closed)

    @property
    def markers(self) -> list[str]:
        """Tags that the parsers look for in the output."""
        markers = [] if self.reasoning_tags is None else self.reasoning_tags.markers
        return markers + ([] if self.calls is None else self.calls.markers)

    @property
    def reasoning_tags(self) -> ReasoningTags | None:
        reasoning = REASONING_FORMATS.get(self.reasoning_parser)
        return None if reasoning is None else reasoning.tags

    @property
    def calls(self) -> CallFormat | None:
        return CALL_FORMATS.get(self.tool_call_parser)

    def check(self, body: ChatBody) -> None:
        """Raise RequestError if the model cannot use the request's tools."""
        if not body.offered_tools:
            return
        if not self.shows_tools:
            raise RequestError(
                "tools cannot be used, because the chat template of this model does not show them to the model", "tools"
            )
        if body.tool_choice in (None, "auto") and self.tool_call_parser == "none":
            message = (
                "tool_choice must be required or the name of a tool, because the format of this model's calls is "
                "unknown (set tool_call_parser in the configuration)"
            )
            raise RequestError(message, "tool_choice")

    def thinking(self, body: ChatBody, prompt: str) -> Thinking:
        """Return whether the output begins with reasoning. prompt: the rendered chat template."""
        tags = self.reasoning_tags
        if tags is None:
            return "never"
        if body.continue_final_message:
            text = str(body.messages[-1].for_template()["content"])
            return "begun" if max(map(text.rfind, tags.opens)) > max(map(text.rfind, tags.closes)) else "never"
        end = prompt.rstrip()
        if end.endswith(tags.opens):
            return "begun"
        return "never" if end.endswith(tags.closes) else "maybe"

    def output_format(self, body: ChatBody, thinking: Thinking, tokens: VisibleMarkers) -> OutputFormat:
        tools = {tool.function.name: tool.arguments_schema for tool in body.offered_tools}
        calls = self.tool_call_parser if tools else "none"
        named = isinstance(body.tool_choice, NamedToolChoice)
        if isinstance(body.tool_choice, NamedToolChoice):
            tools = {body.tool_choice.function.name: tools[body.tool_choice.function.name]}
        natively = self.calls is not None and bool(tools) and self.calls.forced_natively(tokens.ids.get)
        if (named or body.tool_choice == "required") and not natively:
            calls = "arguments" if named else "json"
        return OutputFormat(
            tool_calls=calls,
            tools=tools,
            named=named,
            forced=named or body.tool_choice == "required",
            parallel=body.parallel_tool_calls,
            reasoning=self.reasoning_parser,
            reasoning_begun=thinking == "begun",
            include_reasoning=body.include_reasoning,
            id_length=None if self.calls is None else self.calls.id_length,
        )

    def structured_outputs(
        self, body: ChatBody, thinking: Thinking, content: StructuredOutputsParams | None, tokens: VisibleMarkers
    ) -> StructuredOutputsParams | None:
        """Return the structure of the whole output. content: structure of its content alone. Raises
        InvalidParameter."""
        grammar = ToolGrammar(
            body=body,
            content=content,
            tool_call_parser=self.tool_call_parser,
            tags=self.reasoning_tags,
            thinking=thinking,
            lark=Lark(self.markers, tokens.ids.get, self.closed),
        )
        return grammar.params()


def _format_with_tokens(tokenizer: ChatTokenizer) -> str:
    """Return the only format whose first marker is a token of the model, for templates that write no calls of earlier
    turns (LFM2's)."""
    formats = [each for each in FORMATS if each.markup is not None]
    tokens = VisibleMarkers(tokenizer, (opener for each in formats for opener in each.opens)).ids
    found = [each.names[0] for each in formats if tokens.keys() & {*each.opens}]
    return found[0] if len(found) == 1 else "none"


class VisibleMarkers:
    """TokenBytes of a tokenizer that decodes these markers to text even if they are special tokens.

    ids: token ids of the markers that are single tokens.
    """

    def __init__(self, tokenizer: ChatTokenizer, markers: Iterable[str]):
        self.token_bytes = tokenizer.token_bytes
        self._is_special = tokenizer.is_special
        encoded = {marker: tokenizer.encode(marker, add_special_tokens=False) for marker in markers}
        self.ids = {marker: token_ids[0] for marker, token_ids in encoded.items() if len(token_ids) == 1}
        self._visible = frozenset(self.ids.values())

    def is_special(self, token_id: int) -> bool:
        return token_id not in self._visible and self._is_special(token_id)
