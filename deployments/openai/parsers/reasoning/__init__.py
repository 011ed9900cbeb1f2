"""Parsers of the reasoning of each family of models."""
