"""Ops with versions for CPU and GPU. All versions of an op have the same signature; the plain torch version is the
oracle."""
