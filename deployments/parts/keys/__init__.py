"""API keys that are made while the server runs."""
