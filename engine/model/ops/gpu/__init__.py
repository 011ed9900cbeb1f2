"""Fast ops for GPUs, in Triton; imported only if `gpu_kernels` in ops/dispatch.py returns True.

Checked under Triton's interpreter and compiled for sm_90 (the experts' also for sm_80); none has run on a GPU yet.
"""

from engine.model.ops import dispatch

if dispatch.triton_found():
    from engine.model.ops.gpu.kernel_cache.image_cache import use_image

    use_image()
