"""Requests with which engines end by themselves."""
