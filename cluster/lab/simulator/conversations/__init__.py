"""Conversations of a trace: requests that wait for the answers to others, drawn or read from a file."""
