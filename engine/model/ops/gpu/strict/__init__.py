"""Kernels in which a row has the same bits in any batch, for `determinism: strict` on a GPU."""
