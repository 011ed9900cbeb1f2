"""Images of requests: loading them, within limits."""
