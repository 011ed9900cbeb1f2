"""Fields that clients send and this server does not have."""

from __future__ import annotations

import json

from pydantic import JsonValue

# Accepted and not used: they promise nothing that is not so. Prefixes are cached by their content, whatever the key.
IGNORED_FIELDS = {
    "metadata",
    "prompt_cache_key",
}
# Accepted only with a value that means "off", or what this server does anyway.
NEUTRAL_VALUES: dict[str, list[JsonValue]] = {
    "best_of": [1],
    "suffix": [""],
    "functions": [],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "use_beam_search": [False],
    "length_penalty": [1, 1.0],
    "spaces_between_special_tokens": [True],
    "store": [False],
    "service_tier": ["auto", "default"],
    "prompt_cache_retention": ["in_memory"],
    "verbosity": ["medium"],
}
# Replaced in OpenAI's API long ago.
REPLACEMENTS = {"functions": "tools", "function_call": "tool_choice"}


def has_no_effect(name: str, value: JsonValue) -> bool:
    """Whether the field may be left out without the client noticing."""
    return name in IGNORED_FIELDS or (name in NEUTRAL_VALUES and value in NEUTRAL_VALUES[name])


def unsupported_message(name: str) -> str:
    """What to tell a client that sent it."""
    if name in REPLACEMENTS:
        return f"{name} is not supported by this server; use {REPLACEMENTS[name]}"
    if name in NEUTRAL_VALUES:
        return f"{name} is only supported with the value {' or '.join(map(json.dumps, NEUTRAL_VALUES[name]))}"
    return f"{name} is not supported by this server"
