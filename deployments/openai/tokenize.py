"""Text to token ids and back over HTTP, as vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from deployments.openai.requests import Message, RequestBody, TemplateOptions
from deployments.openai.tools import Tool
from engine.errors import InvalidParameter, RequestError


class TokenizeBody(RequestBody):
    """POST /tokenize

    prompt: a text; or messages, and the tools they may call, as they would reach the model from a chat request.
    add_special_tokens: None means what a completion of this prompt does (yes), or a chat (its template knows).
    return_token_strs: also each token as it stands in the vocabulary.
    """

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if self.tools is not None and self.messages is None:
            raise RequestError("tools is only allowed with messages", "tools")
        if self.add_special_tokens and self.messages is not None:
            limit = "false with messages, whose template brings the special tokens"
            raise InvalidParameter("add_special_tokens", self.add_special_tokens, limit)
        self.template.check()

    @property
    def template(self) -> TemplateOptions:
        return TemplateOptions(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)


class DetokenizeBody(RequestBody):
    """POST /detokenize"""

    tokens: list[int]


class Tokens(msgspec.Struct):
    """The response of /tokenize; max_model_len: of the model."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct):
    """The response of /detokenize."""

    prompt: str
