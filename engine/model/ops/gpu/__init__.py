"""Fast ops for GPUs, in Triton. Nothing here is imported unless `gpu_kernels` in ops/dispatch.py says so."""
