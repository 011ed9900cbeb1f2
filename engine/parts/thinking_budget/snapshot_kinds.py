"""What a snapshot of a scheduler has of budgets of reasoning."""

from __future__ import annotations

from engine.parts.snapshot_kinds import SnapshotKinds
from engine.parts.thinking_budget.thinking_budgets import ThinkingBudgets

KINDS = SnapshotKinds(objects=(ThinkingBudgets,))
