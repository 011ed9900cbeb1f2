"""Makes what checks the budgets of reasoning of an engine."""

from __future__ import annotations

from engine.parts.setup import Made, PartSetup
from engine.parts.thinking_budget.thinking_budgets import ThinkingBudgets


def make(setup: PartSetup) -> Made:
    return Made([ThinkingBudgets(setup.loaded.model.vocab_size)])
