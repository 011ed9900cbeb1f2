"""Parsers of tool calls, by format."""
