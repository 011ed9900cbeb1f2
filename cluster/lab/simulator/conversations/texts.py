"""Texts of a file, of which a trace keeps only how long they are, and which prompts begin alike."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.lab.simulator.conversations.dialogue import Dialogue, Ids

CHARACTERS = 4  # per token, roughly, in English and in source code
OUTPUT_TOKENS = 128  # of an answer, where a file says nothing of it


def say_texts(conversation: Dialogue, ids: Ids, texts: Iterable[tuple[str, str]]) -> None:
    """Add texts to a conversation. texts: role and content of each. Equal texts after equal ones are the same."""
    for role, text in texts:
        tokens = max(1, -(-len(text) // CHARACTERS))
        conversation.say([ids.of((conversation.last, role, text), tokens)])
