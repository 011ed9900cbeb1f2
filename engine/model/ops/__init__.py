"""Ops with versions for CPU and GPU. All versions of an op have the same signature. Tests compare every other version
with the one in plain torch."""
