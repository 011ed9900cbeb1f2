"""Images of requests: where they come from, and within which limits."""
