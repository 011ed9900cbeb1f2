"""Holds in requests of the OpenAI and Anthropic APIs."""
