"""Budgets of reasoning on a rank."""
