"""What an engine on a CPU takes of the machine's memory: its KV blocks when they are first used, and little else."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import random
import psutil
from manta import LLM, SamplingParams

def resident_mib():
    return psutil.Process().memory_info().rss / 2**20

def ask(requests):
    for _ in range(requests // 50):
        prompts = [" ".join(rng.choices(WORDS, k=rng.choice([3, 30, 150]))) for _ in range(50)]
        params = [
            SamplingParams(
                temperature=rng.choice([0, 1]), max_tokens=rng.choice([4, 20, 40]), logprobs=rng.choice([None, 5])
            )
            for _ in prompts
        ]
        llm.generate(prompts, params)
    return resident_mib()

WORDS = "ocean lamp winter dog music river stone letter house tree cat water fire wind book".split()
rng, llm = random.Random(0), LLM("pocket", num_gpu_blocks_override={num_blocks}, max_num_seqs=32)
print(ask(300), ask(900))
"""
KV_MIB = 4 * 2 * 4 * 32 * 2 * 16 / 2**20  # of a block: layers, keys and values, heads, their size, bytes, tokens


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [512, 16384])
def test_after_its_first_requests_an_engine_grows_only_by_the_kv_blocks_that_are_used_for_the_first_time(num_blocks):
    script = SCRIPT.replace("{num_blocks}", str(num_blocks))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=True)
    before, after = map(float, done.stdout.split()[-2:])
    used_mib = 0.0 if num_blocks == 512 else 900 * 110 / 16 * KV_MIB  # 110 tokens are more than a request's mean
    assert after - before < 24 + used_mib
