"""Requests with an Idempotency-Key: one answer, each token of its stream once, whatever ends in between."""
