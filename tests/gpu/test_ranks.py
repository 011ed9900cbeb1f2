"""Several GPUs that share a model, over NCCL, with the collectives inside the graphs."""

from __future__ import annotations

import importlib.util
import random
import threading
import time

import pytest
import torch

from engine import LLM, SamplingParams
from engine.errors import EngineUnavailable
from tests.models import make_model

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, here are {GPUS}"),
    pytest.mark.skipif(importlib.util.find_spec("zmq") is None, reason="ranks need pyzmq"),
]


@pytest.mark.parametrize("ranks", [n for n in (2, 4, 8) if n <= max(GPUS, 2)])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_ranks_say_what_one_says(ranks, enforce_eager, tmp_path):
    folder = make_model(
        tmp_path, "llama", tokenizer=True, num_attention_heads=8, num_key_value_heads=8, intermediate_size=128
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    options = {"dtype": "float32", "num_gpu_blocks_override": 256, "max_num_seqs": 16, "device": "cuda"}
    outputs = []
    for size in (1, ranks):
        with LLM(str(folder), tensor_parallel_size=size, enforce_eager=enforce_eager, **options) as llm:
            results = llm.generate(prompts, params, use_tqdm=False)
            outputs.append([result.outputs[0] for result in results])
    for one, several in zip(*outputs, strict=True):
        for position, entry in enumerate(one.logprobs):
            if one.token_ids[position] != several.token_ids[position]:
                first, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
                assert first - second < 2e-3
                break


def test_a_rank_that_is_killed_while_it_decodes_ends_the_others_at_once(tmp_path):
    """NCCL's kernels of rank 0 wait for it in the middle of a graph."""
    folder = make_model(
        tmp_path, "llama", tokenizer=True, num_attention_heads=8, num_key_value_heads=8, intermediate_size=128
    )
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    llm = LLM(str(folder), tensor_parallel_size=2, num_gpu_blocks_override=256, device="cuda")
    (rank_1,) = llm._ranks.processes
    threading.Timer(0.3, rank_1.kill).start()
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match="rank 1"):
        llm.generate([[5, 6, 7]] * 2000, params, use_tqdm=False)
    llm.close()
    assert time.monotonic() - started < 60
