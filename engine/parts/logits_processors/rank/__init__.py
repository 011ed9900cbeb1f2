"""Edits of logits on a rank."""
