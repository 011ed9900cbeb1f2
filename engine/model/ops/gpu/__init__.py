"""Fast ops for GPUs, in Triton; imported only where `gpu_kernels` in ops/dispatch.py says so.

Checked under Triton's interpreter and compiled for sm_90 (the experts' also for sm_80); none has run on a GPU yet.
"""
