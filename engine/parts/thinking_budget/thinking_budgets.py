"""Checks budgets of reasoning. Their ends on the ranks do the rest."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.door.part import Part
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.remote_request import RemoteRequest


class ThinkingBudgets(Part):
    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def check(self, asked: GenerateRequest | RemoteRequest, prompt: Sequence[int]) -> None:
        """Raises InvalidParameter for a tag that the model does not have."""
        if (budget := ThinkingBudget.of(asked.params)) is not None:
            budget.check_vocabulary(self._vocab_size)
