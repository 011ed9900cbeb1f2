"""Embeddings, classes and scores of texts."""
