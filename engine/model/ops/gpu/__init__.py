"""Fast ops for GPUs, in Triton; imported only if `gpu_kernels` in ops/dispatch.py returns True.

Checked under Triton's interpreter and compiled for sm_90 (the experts' also for sm_80); none has run on a GPU yet.
"""
