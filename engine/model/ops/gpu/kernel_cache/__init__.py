"""Compiled Triton kernels that an image brings along, so that no pod compiles them again."""
