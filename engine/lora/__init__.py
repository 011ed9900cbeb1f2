"""Low-rank adapters: their files, and their weights in an engine."""
