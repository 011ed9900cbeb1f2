"""Fast ops for CPUs, in Numba. Each has a plain twin in engine/model/ops, which is its oracle."""
