"""Limits of reasoning."""
