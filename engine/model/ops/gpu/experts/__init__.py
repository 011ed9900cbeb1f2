"""Experts of a layer on a GPU."""
