"""Prompts for embeddings and scores: from texts to token ids."""
