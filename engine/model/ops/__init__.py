"""Ops with versions for CPU and GPU. All versions of an op have the same signature. Tests compare the others with the
version in plain torch."""
