"""Speed and accuracy of a model as it is and with weights that are rounded as they are loaded, in turns.

Speed is the CPU time of the whole process and the time on the clock, for one stream and for a long prompt. Accuracy is
how well a rounded model knows what the model itself answers when asked for the meaning of words: the perplexity of
those answers, and the shares of tokens and of whole answers that would be the same.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, fields
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import DtypeOption, JsonOption, ModelOption, print_report, run
from cluster.cli.bench.prompts import random_ids
from cluster.terminal.tables import figure, make_table, show
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.offline.llm import LLM
from engine.wire.sampling_params import SamplingParams
from tools.pocket.words import EVERYDAY

METHODS = (None, "int8", "int4")
OUTPUT_LEN = 33
PROMPT_LEN = 512


@dataclass(frozen=True, slots=True)
class MethodReport:
    method: str
    token_cpu_ms: float  #: of a token of one stream, median
    token_ms: float
    prompt_cpu_ms: float  #: of PROMPT_LEN tokens, median
    prompt_ms: float
    perplexity: float | None = None  #: of the answers of the model as it is
    same_tokens: float | None = None  #: share of their tokens that are the likeliest after those before
    same_answers: float | None = None  #: share of answers


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    model: str
    dtype: str
    threads: int
    rounds: int
    methods: list[MethodReport]


def measure(
    *, model: str = "pocket", words: int = 100, rounds: int = 5, threads: int = 1, **options: Any
) -> QuantizationReport:
    """words: how many are asked for; 0 leaves accuracy out, as for random weights. options: fields of EngineConfig."""
    options = {"num_threads": threads, "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**28, **options}
    vocab_size = ModelConfig.from_folder(resolve(model)).vocab_size
    engines = {method: LLM(model, quantization=method, **options) for method in METHODS}
    short, long = ([random_ids(random.Random(0), length, vocab_size)] for length in (16, PROMPT_LEN))
    spent: dict[str | None, list[tuple[float, ...]]] = {method: [] for method in METHODS}
    for _ in range(rounds + 1):
        for method, llm in engines.items():
            first, all = time_of(llm, short, 1), time_of(llm, short, OUTPUT_LEN)
            decode = tuple((b - a) / (OUTPUT_LEN - 1) for a, b in zip(first, all, strict=True))
            spent[method].append((*decode, *time_of(llm, long, 1)))
    accuracies = compare(engines, words) if words else {}
    for llm in engines.values():
        llm.close()
    reports = []
    for method, times in spent.items():
        medians = (1e3 * median(column) for column in zip(*times[1:], strict=True))  # the first warms up
        reports.append(MethodReport(method or "as it is", *medians, *accuracies.get(method, ())))
    return QuantizationReport(model, engines[None].config.dtype, threads, rounds, reports)


def time_of(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
    """CPU time and time on the clock, in seconds."""
    started = time.process_time(), time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len), use_tqdm=False)
    return time.process_time() - started[0], time.perf_counter() - started[1]


def compare(engines: dict[str | None, LLM], words: int) -> dict[str | None, tuple[float, float, float]]:
    """Perplexity of the answers of the model as it is, and the shares of tokens and of answers that are the same."""
    tokenizer = engines[None].tokenizer
    chats = [[{"role": "user", "content": f"What does {word} mean?"}] for word in EVERYDAY[:words]]
    prompts = [tokenizer.apply_chat_template(chat) for chat in chats]
    expected = answers(engines[None], prompts)
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    found = {}
    for method, llm in engines.items():
        outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        rows = [
            next(iter(row.values()))  # the prompt's own token
            for output, prompt in zip(outputs, prompts, strict=True)
            for row in (output.prompt_logprobs or [])[len(prompt) :]
            if row is not None
        ]
        perplexity = math.exp(-sum(row.logprob for row in rows) / len(rows))
        same = sum(a == b for a, b in zip(answers(llm, prompts), expected, strict=True)) / len(expected)
        found[method] = perplexity, sum(row.rank == 1 for row in rows) / len(rows), same
    return found


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def show_report(report: QuantizationReport) -> None:
    table = make_table("", *(method.method for method in report.methods))
    for field in fields(MethodReport)[1:]:
        table.add_row(field.name.replace("_", " "), *(figure(getattr(m, field.name), 3) for m in report.methods))
    plain = report.methods[0]
    table.add_section()
    for name in ("token_cpu_ms", "prompt_cpu_ms"):
        ratios = (getattr(method, name) / getattr(plain, name) for method in report.methods)
        table.add_row(f"{name.replace('_', ' ')} / as it is", *(figure(ratio, 2) for ratio in ratios))
    show(f"{report.model}, {report.dtype}, {report.threads} threads; medians of {report.rounds} rounds in turns", table)


def main(
    model: ModelOption = "pocket",
    dtype: DtypeOption = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often each takes its turn.")] = 5,
    words: Annotated[int, typer.Option(help="Words that are asked for; 0 for random weights.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Speed and accuracy of a model as it is, in int8 and in int4."""
    report = measure(model=model, dtype=dtype, threads=threads, rounds=rounds, words=words)
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)
