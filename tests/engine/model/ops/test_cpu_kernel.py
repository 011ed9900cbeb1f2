"""How CPU kernels are compiled and found again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ANSWER = """
from engine import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
with LLM("pocket", dtype="float32", num_threads=1, num_blocks=64) as llm:
    (output,) = llm.generate(["The quick brown fox jumps over the lazy dog, and then"], params, progress=False)
print([(entry.token_id, entry.logprob) for entry in output.outputs[0].logprobs])
"""


@pytest.mark.slow
def test_a_process_that_compiles_the_kernels_gives_the_bits_of_one_that_finds_them_compiled(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ANSWER]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert first.count("(") == 24
