"""Fast ops for GPUs, in Triton; imported only if `gpu_kernels` in ops/dispatch.py returns True."""
