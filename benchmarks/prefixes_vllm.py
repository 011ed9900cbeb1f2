"""vLLM's CPU backend for benchmarks.prefixes, in a process of its own with the Python of its environment.

Reads prompts and the number of answered tokens as JSON. For an engine without and one with a prefix cache, it prints a
line of JSON: prompt tokens that were computed, and seconds. Nothing but the standard library is imported before vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from benchmarks.vllm_answers import open_answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype")
    args = parser.parse_args()
    answers = open_answers(kv_cache_gib=2)
    import vllm

    asked = json.load(sys.stdin)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    tokens = sum(map(len, asked["prompts"]))
    params = vllm.SamplingParams(temperature=0.0, max_tokens=asked["answer"], ignore_eos=True, detokenize=False)
    for cached in (False, True):
        llm = vllm.LLM(
            args.model, dtype=args.dtype, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=len(prompts),
            max_model_len=max(map(len, asked["prompts"])) + asked["answer"], enable_prefix_caching=cached,
        )  # fmt: skip
        for _ in range(2):  # the first warms up
            llm.reset_prefix_cache()
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        computed = tokens - sum(output.num_cached_tokens or 0 for output in outputs)
        print(json.dumps({"computed": computed, "seconds": seconds}), file=answers, flush=True)
        del llm


if __name__ == "__main__":
    main()
