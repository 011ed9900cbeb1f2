"""Fast ops for GPUs, in Triton. Nothing here is imported unless `engine.ops.versions.gpu_kernels()` says so."""
