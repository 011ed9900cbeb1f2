"""Names of the parsers of answers, as configurations give them; vLLM has the same.

auto: what the chat template makes certain. none: all text is content. `qwen3` and `deepseek_r1` are other names of
`think`.
"""

from __future__ import annotations

from typing import Literal

ToolCallParserName = Literal["auto", "none", "hermes", "llama3_json"]
ReasoningParserName = Literal["auto", "none", "think", "qwen3", "deepseek_r1"]
