"""Embeddings, classes, scores and rankings: requests answered with vectors and numbers instead of text."""
