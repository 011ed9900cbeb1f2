"""How a model writes tool calls and reasoning, as its configuration says or its chat template shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deployments.openai import reasoning
from deployments.openai.answer_grammar import AnswerGrammar, Thinking
from deployments.openai.answer_reader import AnswerFormat
from deployments.openai.protocol import ChatBody
from deployments.openai.tool_parsers import hermes
from deployments.openai.tools import NamedToolChoice
from engine.errors import RequestError
from engine.structured_outputs import StructuredOutputsParams
from engine.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
TOOL_CALL_PARSERS = ("hermes", "llama3_json")
REASONING_PARSERS = {"think": "think", "qwen3": "think", "deepseek_r1": "think"}  # vLLM's names, and ours

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
# how templates of each parser write _CALL
_HERMES_CALL = re.compile(r'<tool_call>\s*\{"name": ?"example_function", ?"arguments": ?\{"key": ?"value"}}')
_LLAMA3_CALL = re.compile(r'\s\{"name": ?"example_function", ?"parameters": ?\{"key": ?"value"}')


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """tool_call_parser, reasoning_parser: None where the model has no format that is known.

    shows_tools: the chat template puts the tools of a request into the prompt.
    """

    tool_call_parser: str | None
    reasoning_parser: str | None
    shows_tools: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> ChatFormat:
        """The parsers: a name, `none`, or `auto` for what the chat template makes certain."""
        if tool_call_parser == AUTO:
            tool_call_parser = _tool_call_parser(tokenizer)
        if reasoning_parser == AUTO:
            reasoning_parser = "think" if reasoning.CLOSE in (tokenizer.chat_template or "") else NONE
        return cls(
            None if tool_call_parser == NONE else tool_call_parser,
            None if reasoning_parser == NONE else REASONING_PARSERS[reasoning_parser],
            "example_function" in _rendered(tokenizer, [_QUESTION]),
        )

    @property
    def markers(self) -> list[str]:
        """What the parsers look for in the text."""
        markers = [reasoning.OPEN, reasoning.CLOSE] if self.reasoning_parser else []
        return markers + ([hermes.OPEN, hermes.CLOSE] if self.tool_call_parser == "hermes" else [])

    def check(self, body: ChatBody) -> None:
        """Raise RequestError for tools that this model cannot be given."""
        if not body.offered_tools:
            return
        if not self.shows_tools:
            raise RequestError("tools: the chat template of this model does not show them to the model", "tools")
        if body.tool_choice in (None, "auto") and self.tool_call_parser is None:
            message = (
                "tool_choice must be required or the name of a tool: how this model calls tools of its own accord is "
                "not known (tool_call_parser in the configuration says it)"
            )
            raise RequestError(message, "tool_choice")

    def thinking(self, body: ChatBody, prompt: str) -> Thinking:
        """prompt: the text that the chat template made of the body."""
        if self.reasoning_parser is None:
            return "never"
        end = prompt.rstrip()
        if body.continue_final_message:
            end = str(body.messages[-1].for_template()["content"])
        if end.rfind(reasoning.OPEN) > end.rfind(reasoning.CLOSE) and (
            body.continue_final_message or end.endswith(reasoning.OPEN)
        ):
            return "begun"
        return "never" if body.continue_final_message or end.endswith(reasoning.CLOSE) else "maybe"

    def answer(self, body: ChatBody, thinking: Thinking) -> AnswerFormat:
        names = [tool.function.name for tool in body.offered_tools]
        calls = self.tool_call_parser if names else None
        if isinstance(body.tool_choice, NamedToolChoice):
            calls, names = "named", [body.tool_choice.function.name]
        elif body.tool_choice == "required":
            calls = "json"
        return AnswerFormat(
            tool_calls=calls,
            tools=frozenset(names),
            parallel=body.parallel_tool_calls,
            reasoning=self.reasoning_parser is not None,
            reasoning_begun=thinking == "begun",
            include_reasoning=body.include_reasoning,
        )

    def structured_outputs(
        self, body: ChatBody, thinking: Thinking, content: StructuredOutputsParams | None, tokens: VisibleMarkers
    ) -> StructuredOutputsParams | None:
        """What the answers have to be, of which `content` is what the request asks of their content.

        Raises InvalidParameter.
        """
        grammar = AnswerGrammar(
            content=content,
            tools=body.offered_tools,
            choice=body.tool_choice,
            parallel=body.parallel_tool_calls,
            call_parser=self.tool_call_parser,
            thinking=thinking,
            token_of=tokens.ids.get,
        )
        return grammar.params()


class VisibleMarkers:
    """The tokens of a model, of which these markers are text, even where the tokenizer calls them special.

    ids: of markers that are one token.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str]):
        self.token_bytes = tokenizer.token_bytes
        self._is_special = tokenizer.is_special
        encoded = {marker: tokenizer.encode(marker, add_special_tokens=False) for marker in markers}
        self.ids = {marker: token_ids[0] for marker, token_ids in encoded.items() if len(token_ids) == 1}
        self._visible = frozenset(self.ids.values())

    def is_special(self, token_id: int) -> bool:
        return token_id not in self._visible and self._is_special(token_id)


def _tool_call_parser(tokenizer: Tokenizer) -> str:
    """By the way in which the template writes a call of an earlier turn: so the model will write its own."""
    text = _rendered(tokenizer, [_QUESTION, _CALL])
    if _HERMES_CALL.search(text):
        return "hermes"
    return "llama3_json" if _LLAMA3_CALL.search(text) else NONE


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    try:
        return tokenizer.render_chat_template(messages, [_TOOL], add_generation_prompt=False)
    except RequestError:
        return ""  # no template, or one that refuses such a conversation
