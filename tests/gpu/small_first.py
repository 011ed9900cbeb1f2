"""`make first-gpu` on what stands in for a GPU: the same script with small numbers.

A sitecustomize.py that imports this makes every process of the script a stand-in (tests/benchmarks/test_first_gpu.py).
Processes of pytest have the plugin instead.
"""

from __future__ import annotations

import os
import sys

if "--first" in sys.orig_argv:  # it has no device, and its plan is of kernels that are compiled
    os.environ.pop("TRITON_INTERPRET", None)
    from dataclasses import replace

    from benchmarks.gpu import first

    first.FIRST = tuple(replace(part, limit_s=20 * part.limit_s) for part in first.FIRST)  # interpreted
elif "--part" in sys.orig_argv or "device_count" in sys.orig_argv[-1]:
    from tests.gpu import stand_in

    stand_in.install()
    if is_compiled := "kernels compiled" in sys.orig_argv:
        del os.environ["TRITON_INTERPRET"]  # they are compiled as for a card
    if "--part" in sys.orig_argv:
        if not is_compiled:
            stand_in.install_kernels()

        from benchmarks.gpu import card, engines, first, parts
        from engine.runner.graphs import cuda_graphs
        from tests.gpu.test_first import small_shape

        for name, shape in engines.SHAPES.items():
            engines.SHAPES[name] = {**small_shape(shape), "num_hidden_layers": 2}
        for module in (card, parts):
            module.MATRIX = 16
        card.COPY_BYTES, first.BATCHES = 1024, (1, 3)
        first.TRIED = {"8B": first.TRIED["8B"]}  # tests/gpu/test_first.py tries the others
        decode = first.decode
        first.decode = lambda card, size, *args, **options: decode(card, 3, *args, **options)
        parts.CONTEXT, parts.WARM_STEPS, parts.STEPS, parts.PROFILED_STEPS = 8, 1, 2, 2
        parts.PROMPT, parts.MODEL_LEN = 256, 300
        cuda_graphs.MAX_DECODE_SIZE = cuda_graphs.MAX_MIXED_SIZE = 8
        build = engines.EngineConfig
        engines.EngineConfig = lambda **options: build(**options, num_gpu_blocks_override=200, num_threads=1)
