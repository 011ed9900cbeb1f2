"""Experts that several ranks share, on each of them."""
