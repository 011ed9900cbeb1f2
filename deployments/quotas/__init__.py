"""Limits of API keys. Several ingresses keep them together, by leases of parts of each limit."""
