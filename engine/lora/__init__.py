"""Low-rank adapters: reading their files, and loading their weights into an engine."""
