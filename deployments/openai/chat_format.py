"""The format in which a model writes tool calls and reasoning, from its configuration or its chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deployments.openai.conversation import NamedToolChoice
from deployments.openai.parsers import ReasoningParserName, ToolCallParserName, hermes, reasoning
from deployments.openai.parsers.choice_parser import OutputFormat
from deployments.openai.request_bodies import ChatBody
from deployments.openai.tool_grammar import Thinking, ToolGrammar
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from engine.wire.structured_outputs import StructuredOutputsParams

_QUESTION = {"role": "user", "content": "?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "example_function",
        "description": "An example.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "example_function", "arguments": {"key": "value"}}}
    ],
}
# _CALL as the templates of each parser write it
_HERMES_CALL = re.compile(r'<tool_call>\s*\{"name": ?"example_function", ?"arguments": ?\{"key": ?"value"}}')
_LLAMA3_CALL = re.compile(r'\s\{"name": ?"example_function", ?"parameters": ?\{"key": ?"value"}')


@dataclass(frozen=True, slots=True)
class ChatFormat:
    tool_call_parser: ToolCallParserName
    """Format of tool calls; `none` if it is not known."""
    reasons: bool
    """The model may write its reasoning between tags."""
    shows_tools: bool
    """The chat template puts tools into the prompt."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        tool_call_parser: ToolCallParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
    ) -> ChatFormat:
        if reasoning_parser == "auto":
            reasons = reasoning.CLOSE in (tokenizer.chat_template or "")
        else:
            reasons = reasoning_parser != "none"
        return cls(
            _detect_tool_call_parser(tokenizer) if tool_call_parser == "auto" else tool_call_parser,
            reasons,
            "example_function" in _render(tokenizer, [_QUESTION]),
        )

    @property
    def markers(self) -> list[str]:
        """Tags that the parsers look for in the text."""
        markers = [reasoning.OPEN, reasoning.CLOSE] if self.reasons else []
        return markers + ([hermes.OPEN, hermes.CLOSE] if self.tool_call_parser == "hermes" else [])

    def check(self, body: ChatBody) -> None:
        """Raise RequestError for tools that this model cannot be given."""
        if not body.offered_tools:
            return
        if not self.shows_tools:
            raise RequestError("tools: the chat template of this model does not show them to the model", "tools")
        if body.tool_choice in (None, "auto") and self.tool_call_parser == "none":
            message = (
                "tool_choice must be required or the name of a tool: how this model writes calls is not known "
                "(tool_call_parser in the configuration says it)"
            )
            raise RequestError(message, "tool_choice")

    def thinking(self, body: ChatBody, prompt: str) -> Thinking:
        """Return whether the output begins with reasoning. prompt: the body as the chat template rendered it."""
        if not self.reasons:
            return "never"
        if body.continue_final_message:
            text = str(body.messages[-1].for_template()["content"])
            return "begun" if text.rfind(reasoning.OPEN) > text.rfind(reasoning.CLOSE) else "never"
        end = prompt.rstrip()
        if end.endswith(reasoning.OPEN):
            return "begun"
        return "never" if end.endswith(reasoning.CLOSE) else "maybe"

    def output_format(self, body: ChatBody, thinking: Thinking) -> OutputFormat:
        names = [tool.function.name for tool in body.offered_tools]
        calls: str = self.tool_call_parser if names else "none"
        if isinstance(body.tool_choice, NamedToolChoice):
            calls, names = "named", [body.tool_choice.function.name]
        elif body.tool_choice == "required":
            calls = "json"
        return OutputFormat(
            tool_calls=calls,
            tools=frozenset(names),
            parallel=body.parallel_tool_calls,
            reasoning=self.reasons,
            reasoning_begun=thinking == "begun",
            include_reasoning=body.include_reasoning,
        )

    def structured_outputs(
        self, body: ChatBody, thinking: Thinking, content: StructuredOutputsParams | None, tokens: VisibleMarkers
    ) -> StructuredOutputsParams | None:
        """Return the structure of the whole output; `content` is that of its content. Raises InvalidParameter."""
        grammar = ToolGrammar(
            body=body,
            content=content,
            tool_call_parser=self.tool_call_parser,
            thinking=thinking,
            token_of=tokens.ids.get,
        )
        return grammar.params()


class VisibleMarkers:
    """TokenBytes of a tokenizer, with these markers as text even if the tokenizer calls them special.

    ids: token ids of the markers that are one token.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str]):
        self.token_bytes = tokenizer.token_bytes
        self._is_special = tokenizer.is_special
        encoded = {marker: tokenizer.encode(marker, add_special_tokens=False) for marker in markers}
        self.ids = {marker: token_ids[0] for marker, token_ids in encoded.items() if len(token_ids) == 1}
        self._visible = frozenset(self.ids.values())

    def is_special(self, token_id: int) -> bool:
        return token_id not in self._visible and self._is_special(token_id)


def _detect_tool_call_parser(tokenizer: Tokenizer) -> ToolCallParserName:
    """Detect it from how the template writes a call of an earlier turn: the model will write its own alike."""
    text = _render(tokenizer, [_QUESTION, _CALL])
    if _HERMES_CALL.search(text):
        return "hermes"
    return "llama3_json" if _LLAMA3_CALL.search(text) else "none"


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    try:
        return tokenizer.render_chat_template(messages, [_TOOL], add_generation_prompt=False)
    except RequestError:
        return ""  # no template, or one that refuses such a conversation
