"""Parsers of reasoning, by format."""
