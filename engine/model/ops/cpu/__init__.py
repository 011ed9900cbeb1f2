"""Fast versions of the ops for CPUs, in Numba. Each has a plain twin beside it in engine/model/ops, which is its oracle."""
