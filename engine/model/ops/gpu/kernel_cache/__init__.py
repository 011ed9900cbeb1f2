"""Compiled Triton kernels that a container image contains, so that no pod compiles them again."""
