"""Share of requests whose greedy answers depend on how they were computed.

Every request is computed alone first, without a prefix cache. Then the same prompts run in a batch, in chunks, from a
prefix cache, through preemptions, with drafted tokens, and moved: the first tokens of the answer become part of the
prompt, as when another engine goes on with a request. Tokens are what users see. The bits of their log-probabilities
differ long before a token does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import JsonOption, ModelOption, SeedOption, print_report, run
from cluster.cli.bench.prompts import random_ids
from cluster.cli.bench.tables import make_table, show
from engine.errors import EngineError
from engine.model.checkpoint.folder import resolve
from engine.model.config import ModelConfig
from engine.offline.llm import LLM
from engine.offline.outputs import RequestOutput
from engine.wire.sampling_params import SamplingParams

BATCH = 16
PROMPT_LEN = 4, 250  # tokens of the shortest prompt, and of the longest
CHUNK = 19  # tokens per step, no multiple of a block
BLOCK_SIZE = 16
SPECULATIVE = {"method": "ngram", "prompt_lookup_min": 1}  # so that even random prompts have drafts
DTYPES = ("bfloat16", "float32")

Answer = list[tuple[int, float]]  # each token with its log-probability


@dataclass(frozen=True, slots=True)
class Share:
    """Of the requests that were computed in one way, how many differ from the same requests alone."""

    way: str
    dtype: str
    requests: int
    other_tokens: int
    other_logprobs: int  #: in any bit of any token's log-probability, or in a token


@dataclass(frozen=True, slots=True)
class DeterminismReport:
    model: str
    threads: int
    output_len: int
    shares: list[Share]


def measure(
    *,
    model: str = "pocket",
    dtypes: Sequence[str] = DTYPES,
    requests: int = 32,
    output_len: int = 64,
    seed: int = 0,
    **options: Any,
) -> DeterminismReport:
    """Compute the requests in every way, with one dtype after the other. options: fields of EngineConfig.

    Raises StartupError, or EngineError if a request fails.
    """
    shares = [share for dtype in dtypes for share in compare(model, dtype, requests, output_len, seed, options)]
    return DeterminismReport(Path(model).name, torch.get_num_threads(), output_len, shares)


def compare(model: str, dtype: str, requests: int, output_len: int, seed: int, options: dict[str, Any]) -> list[Share]:
    """Return a Share for each way. The engines come and go one after the other."""
    rng, vocab_size = random.Random(seed), ModelConfig.from_folder(resolve(model)).vocab_size
    prompts = [random_ids(rng, rng.randint(*PROMPT_LEN), vocab_size) for _ in range(requests)]
    kept = [rng.randrange(1, output_len) for _ in range(requests)]  # tokens of the answer that were there before a move
    params = [greedy(output_len)] * requests

    def engine(**more: Any) -> LLM:
        return LLM(model, dtype=dtype, block_size=BLOCK_SIZE, **{"enable_prefix_caching": False, **options, **more})

    with engine() as llm:
        alone = answers(one_by_one(llm, prompts, params))
        longer = [prompt + tokens_of(answer[:k]) for prompt, answer, k in zip(prompts, alone, kept, strict=True)]
        moved = one_by_one(llm, longer, [greedy(output_len - k) for k in kept])
    with engine(max_num_seqs=BATCH) as llm:
        batched = llm.generate(prompts, params, progress=False)
    with engine(max_num_seqs=1, max_num_batched_tokens=CHUNK) as llm:
        chunked = one_by_one(llm, prompts, params)
    with engine(enable_prefix_caching=True) as llm:
        llm.generate(prompts, greedy(1), progress=False)
        cached = one_by_one(llm, prompts, params)
    blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts[:BATCH])  # none is left for their answers
    with engine(max_num_seqs=BATCH, num_blocks=blocks) as llm:
        preempted = llm.generate(prompts, params, progress=False)
    with engine(speculative=SPECULATIVE) as llm:
        drafted = one_by_one(llm, prompts, params)
        verified = llm.stats().spec_decode
    assert verified is not None
    some = verified.num_draft_tokens > 0

    rows = [
        (f"in batches of {BATCH}", batched, [True] * requests, alone),
        (f"in chunks of {CHUNK}", chunked, [len(prompt) > CHUNK for prompt in prompts], alone),
        ("prefix cached", cached, [output.num_cached_tokens > 0 for output in cached], alone),
        ("preempted", preempted, [output.outputs[0].num_preemptions > 0 for output in preempted], alone),
        ("drafted", drafted, [some] * requests, alone),
        ("moved", moved, [True] * requests, [a[k:] for a, k in zip(alone, kept, strict=True)]),
    ]
    shares = []
    for way, outputs, counts, expected in rows:
        found = [
            pair for pair, counted in zip(zip(answers(outputs), expected, strict=True), counts, strict=True) if counted
        ]
        tokens = sum(tokens_of(answer) != tokens_of(wanted) for answer, wanted in found)
        shares.append(Share(way, dtype, len(found), tokens, sum(answer != wanted for answer, wanted in found)))
    return shares


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)


def one_by_one(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    """Compute each request alone."""
    pairs = zip(prompts, params, strict=True)
    return [output for prompt, own in pairs for output in llm.generate([prompt], own, progress=False)]


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    for output in outputs:
        if output.outputs[0].error is not None:
            raise EngineError(output.request_id, output.outputs[0].error)
    return [[(entry.token_id, entry.logprob) for entry in output.outputs[0].logprobs or []] for output in outputs]


def tokens_of(answer: Answer) -> list[int]:
    return [token for token, _ in answer]


def show_report(report: DeterminismReport) -> None:
    table = make_table("computed", "dtype", "requests", "other tokens", "other logprobs")
    for share in report.shares:
        table.add_row(share.way, share.dtype, *map(str, (share.requests, share.other_tokens, share.other_logprobs)))
    show(
        f"{report.model}, {report.threads} threads: greedy requests of {report.output_len} tokens against alone", table
    )


def main(
    model: ModelOption = "pocket",
    dtypes: Annotated[str, typer.Option(help="One or more of float32, bfloat16 and float16.")] = ",".join(DTYPES),
    requests: Annotated[int, typer.Option(min=BATCH, help="Number of requests.")] = 32,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    load_format: Annotated[str, typer.Option(help="`dummy` makes random weights of the model's shapes.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Count greedy requests whose tokens, or log-probabilities, differ when they are not computed alone.

    Example: python -m benchmarks.determinism --model DIR --dtypes bfloat16
    """
    options = {"load_format": load_format, "device": device, "num_threads": threads}
    names = dtypes.replace(",", " ").split()
    report = measure(model=model, dtypes=names, requests=requests, output_len=output_len, seed=seed, **options)
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)
