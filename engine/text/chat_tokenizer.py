"""Converts conversations to token ids, with the chat template of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from engine.errors import ModelFolderError, RequestError
from engine.text.chat_renderer import render_all, render_as_is
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import read_config, read_if_there, read_tokenizer, special_tokens


class ChatTokenizer(Tokenizer):
    """A tokenizer with the model's chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
    ):
        """special_tokens: special tokens by their name in a chat template, such as `bos_token`. chat_template: Jinja
        source. tool_template: that of conversations with tools, if it is another one."""
        super().__init__(backend)
        self._special_tokens = special_tokens
        self.chat_template, self.tool_template = chat_template, tool_template

    @classmethod
    def from_folder(cls, folder: Path, decodes: bool = True, template: str | None = None) -> Self:
        """Read a model folder. Raises ModelFolderError. template: chat template to use instead of the folder's."""
        backend, config = read_tokenizer(folder, decodes), read_config(folder)
        named = chat_templates(folder, config) if template is None else {"default": template}
        tool_template = named.get("tool_use")
        return cls(backend, special_tokens(config), named.get("default", tool_template), tool_template)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a conversation. Takes the arguments of render_chat_template."""
        return self.encode(self.render_chat_template(messages, tools, **kwargs), add_special_tokens=False)

    def render_chat_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """Return the text of a conversation, up to where the assistant's answer begins.

        tools: functions that the model may call, in OpenAI's form. kwargs: variables of the template, such as
        `add_generation_prompt` and `continue_final_message`.
        Raises RequestError if there is no template, or if it refuses the messages or leaves out any of their texts.
        """
        if (source := self.template_for(tools)) is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        return render_all(source, messages, tools, self._special_tokens, {"add_generation_prompt": True, **kwargs})

    def example(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Return what the chat template itself writes of a conversation; empty if it refuses, or if there is none."""
        source = self.template_for(tools)
        return "" if source is None else render_as_is(source, messages, tools, self._special_tokens)

    def template_for(self, tools: Sequence[Any] | None) -> str | None:
        """Return the chat template of conversations with these tools."""
        return (self.tool_template if tools else None) or self.chat_template


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: `default`, and for instance `tool_use`. Raises ModelFolderError if one is not
    text."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    found = read_if_there(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found if {"name", "template"} <= set(each)}
    named = found if isinstance(found, dict) else {} if found is None else {"default": found}
    if not all(isinstance(template, str) for template in named.values()):
        raise ModelFolderError(str(folder), "chat_template is neither a text nor a list of named templates")
    return named
