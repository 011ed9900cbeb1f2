"""From the text a model writes to reasoning, content and tool calls."""

from typing import Literal

# As configurations name them; vLLM has the same names. auto: what the chat template shows. none: all text is content.
ToolCallParserName = Literal["auto", "none", "hermes", "llama3_json"]
ReasoningParserName = Literal["auto", "none", "think", "qwen3", "deepseek_r1"]  # all but the first two are the same
