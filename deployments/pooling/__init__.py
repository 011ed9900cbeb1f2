"""Embeddings, scores and rankings: requests whose answers are vectors and numbers instead of text."""
