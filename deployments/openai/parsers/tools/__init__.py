"""Parsers of the tool calls of each family of models."""
