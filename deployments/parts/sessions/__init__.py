"""Sessions: the books of what an agent's requests have used together, and their budgets."""
