"""Parsers of model output: reasoning, content and tool calls."""

from typing import Literal

# Names in configurations; vLLM has the same. auto: detected from the chat template. none: all text is content.
ToolCallParserName = Literal[
    "auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "gemma4", "glm45", "glm47",
    "granite", "granite4", "hermes", "kimi_k2", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic",
    "minimax_m2", "mistral", "openai", "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml",
    "seed_oss",
]  # fmt: skip
ReasoningParserName = Literal[
    "auto", "none", "deepseek_r1", "deepseek_v3", "deepseek_v4", "gemma4", "glm45", "glm47", "granite",
    "kimi_k2", "minimax_m2", "mistral", "openai_gptoss", "qwen3", "seed_oss", "think",
]  # fmt: skip
