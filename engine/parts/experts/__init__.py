"""Experts that several ranks share."""
