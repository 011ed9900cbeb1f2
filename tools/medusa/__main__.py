"""Train Medusa heads for any model, on its own answers to prompts like those that it will get.

    python -m tools.medusa --model smollm2 --prompts prompts.jsonl --out heads --minutes 10

Each line of the prompts' file is a user's message, a JSON string. The heads are served with
`--speculative-config '{"method": "medusa", "model": "heads", "num_speculative_tokens": 3}'`.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.model.checkpoint.gguf.folder import INDEX as GGUF_INDEX
from engine.model.checkpoint.resolve import resolve
from tools.gguf_numbers import write_numbers
from tools.medusa.heads import add_options, hidden_states, train_heads

logger = logging.getLogger(__name__)

Row = tuple[list[int], int]


def ask(model: str, prompts: list[str], max_tokens: int, threads: int) -> list[Row]:
    """Return the token ids of each prompt with its greedy answer, and how many of them are the prompt."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with LLM(model, num_threads=threads, max_num_seqs=64, max_model_len=2048, kv_cache_memory_bytes=2**30) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=True)
    return [([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids)) for o in outputs]


def load(model: str, folder: Path) -> torch.nn.Module:
    """Load a model in float32 with transformers. folder: where a GGUF file's numbers are written."""
    source = resolve(model)
    if (source / GGUF_INDEX).exists():
        write_numbers(source, folder)
        source = folder
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as for `manta serve`")
    parser.add_argument("--prompts", type=Path, required=True, help="file with a JSON string in each line")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer")
    add_options(parser)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = load(args.model, Path(folder))

    def compute() -> tuple[Tensor, Tensor]:
        prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
        rows = ask(args.model, prompts, args.max_tokens, args.threads)
        logger.info("%d answers, %d tokens", len(rows), sum(len(ids) - prompt for ids, prompt in rows))
        return hidden_states(model, rows, args.heads)

    train_heads(model.get_output_embeddings().weight.detach(), compute, args)  # type: ignore[operator]


if __name__ == "__main__":
    main()
