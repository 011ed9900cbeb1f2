"""vLLM's CPU backend for benchmarks.lora, in a process of its own with the Python of its environment.

It reads a line of JSON for each batch, and answers with the tokens per second, once all of the batch decodes. Nothing
but the standard library is imported before vLLM.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from benchmarks.vllm_answers import open_answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("--max-loras", type=int, default=0, help="0 for an engine without adapters")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    args = parser.parse_args()
    answers = open_answers(kv_cache_gib=1)
    import vllm
    from vllm.lora.request import LoRARequest

    adapted = {"enable_lora": True, "max_loras": args.max_loras, "max_lora_rank": args.max_lora_rank}
    engine = vllm.LLM(
        args.model, dtype=args.dtype, load_format="dummy", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=32,
        **(adapted if args.max_loras else {}),
    ).llm_engine  # fmt: skip
    print("{}", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
        adapters = asked["adapters"]
        for i in range(asked["batch"]):
            prompt = random.Random(str(i)).choices(range(3, asked["vocab_size"]), k=asked["prompt_len"])
            which = i % len(adapters) if adapters else None
            lora = None if which is None else LoRARequest(f"{which}", which + 1, adapters[which])
            engine.add_request(f"{number}-{i}", {"prompt_token_ids": prompt}, params, lora_request=lora)
        outputs = dict[str, int]()
        while len(outputs) < asked["batch"] or min(outputs.values()) < 2:
            for output in engine.step():
                outputs[output.request_id] = len(output.outputs[0].token_ids)
        before, started = sum(outputs.values()), time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = len(output.outputs[0].token_ids)
        seconds = time.perf_counter() - started
        print(json.dumps((sum(outputs.values()) - before) / seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
