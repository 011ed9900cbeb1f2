"""Speculative decoding: what guesses tokens that the model then checks, several in one step."""
