"""Fast ops for GPUs, in Triton. Nothing here is imported unless `engine.model.ops.dispatch.gpu_kernels()` says so."""
