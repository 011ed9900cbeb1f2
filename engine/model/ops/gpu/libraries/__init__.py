"""Attention over the paged cache by libraries that are installed."""
