"""Chooses how the layers of a model are divided over the ranks of a cluster."""
