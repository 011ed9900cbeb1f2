"""Products of tiles, in instructions that Numba cannot express."""
