"""Fields that control how the chat template renders a conversation, and the body of /tokenize, which shares them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from deployments.http.body import RequestBody
from deployments.openai.conversation import Message, Tool
from deployments.openai.foreign_fields import FOREIGN_FIELDS
from engine.errors import InvalidParameter, RequestError

MAX_MESSAGES = 4096
MAX_TOOLS = 512
# Variables that requests cannot set, since the server sets them; `chat_template` itself would be foreign code.
TEMPLATE_RESERVED = {
    "self",
    "messages",
    "conversations",
    "tools",
    "documents",
    "chat_template",
    "return_assistant_tokens_mask",
    "add_generation_prompt",
    "continue_final_message",
}


class TemplateBody(RequestBody):
    """Fields that control how the chat template renders a conversation."""

    foreign_fields = FOREIGN_FIELDS

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, for instance `enable_thinking`."""

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs

    def check_template(self) -> None:
        """Raise InvalidParameter for contradictory or reserved variables."""
        if self.continue_final_message and self.add_generation_prompt:
            limit = "false when continue_final_message is true"
            raise InvalidParameter("add_generation_prompt", self.add_generation_prompt, limit)
        for name in self.chat_template_kwargs:
            if name in TEMPLATE_RESERVED:
                raise InvalidParameter("chat_template_kwargs", name, "variables that are not fields of a request")


class TokenizeBody(TemplateBody):
    """POST /tokenize"""

    prompt: str | None = None
    """A text, instead of `messages`."""
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """A conversation, tokenized as a chat request would be."""
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    """Tools that the model may call in the conversation."""
    add_special_tokens: bool | None = None
    """None means true for a prompt, as in a completion, and false for messages, whose template adds the tokens."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False
    """Whether to add each token, in the vocabulary's spelling, to the response."""

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if self.tools and self.messages is None:
            raise RequestError("tools is only allowed with messages", "tools")
        if self.add_special_tokens and self.messages is not None:
            limit = "false with messages, because the chat template adds the special tokens"
            raise InvalidParameter("add_special_tokens", self.add_special_tokens, limit)
        self.check_template()
