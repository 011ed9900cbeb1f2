"""Tokenizers with chat templates that write tools, calls and reasoning as known families of models do."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import transformers
from tokenizers import AddedToken

from deployments.openai.parsers import harmony
from engine.text.chat_tokenizer import ChatTokenizer
from tests.fake_engine import EOS, Script
from tests.models import make_tokenizer

# Qwen 3: calls as Hermes writes them; the model opens its reasoning itself, or the template closes it for good.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# DeepSeek-R1: the template opens the reasoning.
DEEPSEEK = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}
"""
# Llama 3: a call is the whole answer, and there is one per answer.
LLAMA = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- (tool | tojson) + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
OTHER_MARKERS = [*harmony.MARKERS, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]  # of gpt-oss and Mistral
VOCAB_SIZE = 500


def hf_tokenizer(template: str, markers: str = "tokens") -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer. markers: tags are `tokens`, `special` tokens, or plain `text`."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    if markers != "text":
        tokens = [
            AddedToken(marker, special=markers == "special", normalized=False) for marker in [*MARKERS, *OTHER_MARKERS]
        ]
        tokenizer.add_tokens(tokens, special_tokens=markers == "special")
    return tokenizer


@cache
def chat_tokenizer(template: str, markers: str = "tokens") -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        hf_tokenizer(template, markers).save_pretrained(folder)
        return ChatTokenizer.from_folder(Path(folder))


def answers(tokenizer: ChatTokenizer, text: str, *, ended: bool = True) -> Script:
    """Return a script that answers every request with `text`; unless it `ended`, max_tokens cut it off."""
    return lambda request: tokenizer.encode(text, add_special_tokens=False) + ([EOS] if ended else [])
