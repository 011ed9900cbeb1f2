"""Ops for attention in which each row selects the tokens that it attends to."""
