"""Parsers of model output: reasoning, content and tool calls."""

from typing import Literal

# Names in configurations; vLLM has the same. auto: detected from the chat template. none: all text is content.
ToolCallParserName = Literal["auto", "none", "hermes", "llama3_json"]
ReasoningParserName = Literal["auto", "none", "think", "qwen3", "deepseek_r1"]  # all but the first two are the same
