"""Drafts on a rank."""
