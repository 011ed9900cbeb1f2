"""What the processes of vLLM's CPU backend beside our benchmarks have in common.

Imports only the standard library, since it is imported before vLLM.
"""

from __future__ import annotations

import os
from typing import TextIO


def open_answers(kv_cache_gib: int) -> TextIO:
    """Set vLLM's options, and return a file for answers on stdout. What vLLM prints goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=f"{kv_cache_gib}", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )  # fmt: skip
    return answers
