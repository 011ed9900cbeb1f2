"""Images: which embeddings an engine keeps, and those that encode engines compute for it."""
