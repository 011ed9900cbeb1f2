"""Budgets of reasoning, after which a model has to answer."""
