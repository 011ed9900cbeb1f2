"""The check of KV that came from a tier or another engine."""
