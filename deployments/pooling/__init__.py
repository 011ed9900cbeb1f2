"""Embeddings, scores and rankings: requests whose answers are vectors and numbers in place of text."""
