"""Edits of logits that sampling parameters ask for."""
