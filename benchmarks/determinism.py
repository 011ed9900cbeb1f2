"""Share of requests whose answers depend on how they were computed.

Every request is computed alone first, by one rank and without a prefix cache. Then the same prompts run in a batch, in
chunks, from a prefix cache, through preemptions, with drafted tokens, on several ranks, with prompts that come from
another engine, and moved: the first tokens of the answer become part of the prompt, as when another engine goes on with
a request. Every other request is greedy, the rest have a seed. Tokens are what users see. The bits of their
log-probabilities differ long before a token does.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import JsonOption, ModelOption, SeedOption, print_report, run
from cluster.cli.bench.prompts import random_ids
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineError, InvalidParameter
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.offline.llm import LLM
from engine.offline.outputs import RequestOutput
from engine.offline.rank_processes import RENDEZVOUS_TIMEOUT_S, RankProcesses
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.handoffs import DispatchRemote, HandoffTimes
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams

BATCH = 16
PROMPT_LEN = 4, 250  # tokens of the shortest prompt, and of the longest
CHUNK = 19  # tokens per step, no multiple of a block
BLOCK_SIZE = 16
SPECULATIVE = {"method": "ngram", "prompt_lookup_min": 1}  # so that even random prompts have drafts
IDLE_S = 2e-4  # of two engines that wait for each other
DTYPES = ("bfloat16", "float32")
MODES = ("off", "strict")

Answer = list[tuple[int, float]]  # each token with its log-probability


@dataclass(frozen=True, slots=True)
class Comparison:
    """Numbers of the requests of one scenario that differ from the same requests alone."""

    scenario: str
    dtype: str
    determinism: str
    requests: int
    other_tokens: int
    other_logprobs: int  #: in any bit of any token's log-probability, or in a token
    largest_difference: float  #: of log-probabilities of one token after the same tokens
    cpu_ms_per_token: float | None  #: of an answer, in this process; None with more ranks, which have their own


@dataclass(frozen=True, slots=True)
class DeterminismReport:
    model: str
    threads: int
    output_len: int
    comparisons: list[Comparison]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests that were computed in one way, and the same ones alone."""

    name: str
    answers: list[Answer]
    expected: list[Answer]
    counted: list[bool]  #: whether the request was computed in this way at all
    cpu_s: float | None = None

    def compare(self, dtype: str, determinism: str) -> Comparison:
        pairs = zip(self.answers, self.expected, self.counted, strict=True)
        found = [(answer, wanted) for answer, wanted, counted in pairs if counted]
        return Comparison(
            self.name,
            dtype,
            determinism,
            requests=len(found),
            other_tokens=sum(tokens_of(answer) != tokens_of(wanted) for answer, wanted in found),
            other_logprobs=sum(answer != wanted for answer, wanted in found),
            largest_difference=max((largest_difference(*pair) for pair in found), default=0.0),
            cpu_ms_per_token=self.cpu_s and 1e3 * self.cpu_s / sum(map(len, self.expected)),
        )


def measure(
    *,
    model: str = "pocket",
    dtypes: Sequence[str] = DTYPES,
    modes: Sequence[str] = MODES,
    ranks: Sequence[int] = (2,),
    requests: int = 32,
    output_len: int = 64,
    seed: int = 0,
    **options: Any,
) -> DeterminismReport:
    """Compute the requests in every scenario, with one dtype and one mode of determinism after the other.

    ranks: numbers of them that are compared with one. options: fields of EngineConfig. Raises StartupError, or
    EngineError if a request fails.
    """
    comparisons = []
    for dtype in dtypes:
        for mode in modes:
            engine = {"dtype": dtype, "determinism": None if mode == "off" else mode, **options}
            found = scenarios(model, engine, ranks, requests, output_len, seed)
            comparisons += [scenario.compare(dtype, mode) for scenario in found]
    return DeterminismReport(Path(model).name, torch.get_num_threads(), output_len, comparisons)


def scenarios(
    model: str, options: dict[str, Any], ranks: Sequence[int], requests: int, output_len: int, seed: int
) -> Iterator[Scenario]:
    """Compute the requests in each scenario. The engines come and go one after the other."""
    rng, cfg = random.Random(seed), ModelConfig.from_folder(resolve(model))
    prompts = [random_ids(rng, rng.randint(*PROMPT_LEN), cfg.vocab_size) for _ in range(requests)]
    kept = [rng.randrange(1, output_len) for _ in range(requests)]  # tokens of the answer that were there before a move
    params, every = [sampling(i, output_len) for i in range(requests)], [True] * requests

    def engine(**more: Any) -> LLM:
        return LLM(model, block_size=BLOCK_SIZE, **{"enable_prefix_caching": False, **options, **more})

    with engine() as llm:
        started = time.process_time()
        outputs = one_by_one(llm, prompts, params)
        cpu_s, alone = time.process_time() - started, answers(outputs)
        yield Scenario("alone", alone, alone, every, cpu_s)
        longer = [prompt + tokens_of(answer[:k]) for prompt, answer, k in zip(prompts, alone, kept, strict=True)]
        moved = one_by_one(llm, longer, [sampling(i, output_len - k) for i, k in enumerate(kept)])
        yield Scenario("moved", answers(moved), [answer[k:] for answer, k in zip(alone, kept, strict=True)], every)
    with engine(max_num_seqs=BATCH) as llm:
        started = time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        yield Scenario(f"in batches of {BATCH}", answers(outputs), alone, every, time.process_time() - started)
    with engine(max_num_seqs=1, max_num_batched_tokens=CHUNK) as llm:
        cut = [len(prompt) > CHUNK for prompt in prompts]
        yield Scenario(f"in chunks of {CHUNK}", answers(one_by_one(llm, prompts, params)), alone, cut)
    with engine(enable_prefix_caching=True) as llm:
        llm.generate(prompts, sampling(0, 1), use_tqdm=False)
        outputs = one_by_one(llm, prompts, params)
        yield Scenario("prefix cached", answers(outputs), alone, [output.num_cached_tokens > 0 for output in outputs])
    blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts[:BATCH])  # none is left for their answers
    with engine(max_num_seqs=BATCH, num_gpu_blocks_override=blocks) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        yield Scenario(
            "preempted", answers(outputs), alone, [output.outputs[0].num_preemptions > 0 for output in outputs]
        )
    with engine(speculative_config=SPECULATIVE) as llm:
        outputs, verified = one_by_one(llm, prompts, params), llm.stats().record(SpecDecodeStats)
        assert verified is not None
        yield Scenario("drafted", answers(outputs), alone, [verified.num_draft_tokens > 0] * requests)
    for size in ranks:
        with engine(max_num_seqs=BATCH, tensor_parallel_size=size) as llm:
            yield Scenario(f"on {size} ranks", answers(llm.generate(prompts, params, use_tqdm=False)), alone, every)
    for size in (1, *ranks) if cfg.recurrent is None else (1,):  # states go between ranks of one number
        config = EngineConfig(**{"model": model, "block_size": BLOCK_SIZE, "enable_prefix_caching": False, **options})
        found, received = with_prefill_engine(config, size, prompts, params)
        yield Scenario(f"prompt on {size} other rank{'s' * (size > 1)}", found, alone, received)


def sampling(index: int, tokens: int) -> SamplingParams:
    """Return the parameters of a request: greedy for even ones, else with a seed."""
    return SamplingParams(temperature=index % 2, seed=index, max_tokens=tokens, ignore_eos=True, logprobs=0)


def one_by_one(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    """Compute each request alone."""
    pairs = zip(prompts, params, strict=True)
    return [output for prompt, own in pairs for output in llm.generate([prompt], own, use_tqdm=False)]


def with_prefill_engine(
    config: EngineConfig, size: int, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[Answer], list[bool]]:
    """Compute each prompt in an engine of `size` ranks and its answer in another of one, one request at a time. Returns
    the answers, and which prompts were handed over."""
    prefill_config = replace(config, tensor_parallel_size=size, handoff=HandoffConfig(role="prefill", transport="tcp"))
    decode_config = replace(config, handoff=HandoffConfig(role="decode", transport="tcp", policy="always"))
    found, received, key = [list[tuple[int, float]]() for _ in prompts], [False] * len(prompts), ClusterKey.generate()
    with engine_core("prefill", prefill_config, key) as prefill, engine_core("decode", decode_config, key) as decode:
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            decode.add(GenerateRequest(request_id=str(i), prompt=prompt, params=own))
            while decode.has_work or prefill.has_work:
                prefill.step()
                events = decode.step()
                for notice in decode.mail.take_notices():
                    if isinstance(notice, DispatchRemote):
                        prefill.mail[HandoffCourier].prefill(prefill, notice.request)
                for delta in (event.delta for event in events):
                    if delta.error is not None:
                        raise EngineError(delta.request_id, delta.error.message)
                    found[i] += [(entry.token_id, entry.logprob) for entry in delta.logprobs or []]
                    received[i] |= bool(delta.records(HandoffTimes))
                if not events:
                    time.sleep(IDLE_S)
    return found, received


@contextmanager
def engine_core(name: str, config: EngineConfig, key: ClusterKey) -> Iterator[EngineCore]:
    """An engine that others with this key know by its name."""
    group = TPGroup.single(key)
    with ExitStack() as stack:
        if config.tensor_parallel_size > 1:
            group = listening = TPGroup.listen(config.tensor_parallel_size, device=config.device, key=key)
            stack.callback(RankProcesses(config, group, listening.address).close)
            listening.join(RENDEZVOUS_TIMEOUT_S)
        core = build_engine(config, group, engine_id=name)
        stack.callback(core.close)
        yield core


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    for output in outputs:
        if output.outputs[0].error is not None:
            raise EngineError(output.request_id, output.outputs[0].error)
    firsts = [[next(iter(entry.items())) for entry in output.outputs[0].logprobs or []] for output in outputs]
    return [[(token, entry.logprob) for token, entry in first] for first in firsts]


def tokens_of(answer: Answer) -> list[int]:
    return [token for token, _ in answer]


def largest_difference(one: Answer, other: Answer) -> float:
    """Return that of the log-probabilities, up to the first token that is another."""
    largest = 0.0
    for (token, logprob), (wanted, expected) in zip(one, other, strict=True):
        if token != wanted:
            break
        largest = max(largest, abs(logprob - expected))
    return largest


def show_report(report: DeterminismReport) -> None:
    show(f"{report.model}, {report.threads} threads: answers of {report.output_len} tokens against alone")
    columns = "requests", "other tokens", "other logprobs", "difference", "CPU ms per token"
    for (dtype, mode), comparisons in itertools.groupby(report.comparisons, lambda one: (one.dtype, one.determinism)):
        table = make_table("computed", *columns)
        for comparison in comparisons:
            counts = map(str, (comparison.requests, comparison.other_tokens, comparison.other_logprobs))
            difference, cpu = f"{comparison.largest_difference:.2g}", figure(comparison.cpu_ms_per_token, 3)
            table.add_row(comparison.scenario, *counts, difference, cpu)
        show(f"{dtype}, determinism {mode}", table)


def main(
    model: ModelOption = "pocket",
    dtypes: Annotated[str, typer.Option(help="One or more of float32, bfloat16 and float16.")] = "bfloat16,float32",
    modes: Annotated[str, typer.Option(help="`off`, `strict`, or both.")] = "off,strict",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to compare with one.")] = "2",
    requests: Annotated[int, typer.Option(min=16, help="Number of requests.")] = 32,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    load_format: Annotated[str, typer.Option(help="`dummy` makes random weights of the model's shapes.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Count requests whose tokens, or log-probabilities, differ when they are not computed alone.

    Example: python -m benchmarks.determinism --model DIR --dtypes bfloat16 --ranks "2 4"
    """
    dtype_names, mode_names, sizes = (text.replace(",", " ").split() for text in (dtypes, modes, ranks))
    if unknown := [*{*mode_names} - {*MODES}]:
        raise InvalidParameter("--modes", unknown[0], "off, strict, or both")
    if not all(size.isdecimal() and int(size) > 1 for size in sizes):
        raise InvalidParameter("--ranks", ranks, 'numbers above 1, as "2 4"')
    report = measure(
        model=model,
        dtypes=dtype_names,
        modes=mode_names,
        ranks=[int(size) for size in sizes],
        requests=requests,
        output_len=output_len,
        seed=seed,
        load_format=load_format,
        num_threads=threads,
    )
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)
