"""Fast ops for CPUs, in Numba. Each has a plain version in engine/model/ops, with which tests compare it."""
