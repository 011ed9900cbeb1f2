"""How long the parts of `make first-gpu` should take on a card, before they run.

    python -m benchmarks.gpu --plan 16  # on a machine with so many cores

Needs no GPU. Steps, prompts, graphs, weights and kernels are counted from the parts' own shapes and numbers. They take
what expected.py expects at an H100's rates. What cannot be counted is a constant here, with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from benchmarks.gpu import first, parts
from benchmarks.gpu.card import CARDS, COPY_BYTES, MATRIX, REPEATS, prompt_flops
from benchmarks.gpu.expected import CASES, count, meta_model
from benchmarks.gpu.expected import MATRIX as PROMPT_SHARE
from engine.kernel_trial.steps import CHUNKS, DECODES, PROMPTS
from engine.model.ops.gpu.compile_target import Variant
from engine.offline.precompile import MAX_PROCESSES
from engine.runner.graphs.cuda_graphs import decode_sizes, mixed_sizes

CARD, CAPABILITY = CARDS["H100"], (9, 0)
PROCESS_S = 8.0  # to import torch, Triton and the engine takes 4 s of a CPU; as much again for a context and cuBLAS
COUNT_S = 2.0  # of a CPU, for the steps without values that tell which kernels are needed
KERNEL_S = 0.6  # of a CPU: the mean of 40 kernels of the trials, with Triton 3.7 and its ptxas on a Xeon
NOISE = 9  # times the bytes of weights in 16 bits: their noise is made and scaled in float32, and converted
LAUNCH_S = 20e-6  # of the host, for a kernel of Triton outside a graph
GRAPH_S = 0.1  # to end a capture and to load a graph of some hundred kernels
OPERATION_S = 15e-6  # of the host, for an operation of torch outside a graph, with what calls it
WAIT_S = 30e-6  # for a number that the host reads
SMALL_GRAPH_S = 0.01  # to capture a graph of a layer or two: torch waits for the card and frees its memory before
OPERATIONS, WAITS, LAUNCHES, GRAPHS = 62, 8.3, 2.6, 0.32  # of a comparison: tests/gpu/test_first.py counts them
COMPARED_S = 2 * (OPERATIONS * OPERATION_S + WAITS * WAIT_S + LAUNCHES * LAUNCH_S + GRAPHS * SMALL_GRAPH_S)
"""To copy a call, compute it, also in plain torch and at times in a graph, and compare; twice that, for the memory that
it takes and for kernels of torch that are used for the first time."""
RUNNER_S = 0.5  # of a trial: a layer or two with random weights, 800 operations, and twice the collection of garbage
WHOLE_STEPS, STEP_GRAPHS = 4, 3  # how often a trial computes all its steps to compare them, and captures its graphs
PROFILE_S = 4.0  # to begin a profile, and to read its events
KERNEL_TESTS, KERNEL_TEST_S = 378, 0.2  # a few small launches and their oracle
TEST_VARIANTS = 425  # kernels that these tests compile, as the interpreter tells them apart
ENGINE_TESTS, ENGINE_TEST_S = 20, 25.0  # an engine or two, each with 30 kernels of its own, and the CPU's answer


class Cost(NamedTuple):
    """Something that takes a part of a part's time."""

    seconds: float
    what: str


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    kernels: dict[str, list[Variant]]
    """What the engine of 8B (under "8B engine") and each trial compile."""


def plan(cores: int) -> dict[str, list[Cost]]:
    """Return what each part of `make first-gpu` should cost on a machine with an H100 and so many cores."""
    machine = Machine(cores, first.kernels(CAPABILITY))
    return {part.name: [Cost(PROCESS_S, "process"), *COSTS[part.name](machine)] for part in first.FIRST}


def table(costs: dict[str, list[Cost]]) -> str:
    """Return the plan as a table in Markdown, with the limit of each part and the sum."""
    lines = ["| part | planned | limit | of it |", "| --- " * 4 + "|"]
    for part in first.FIRST:
        of_it = "; ".join(f"{cost.seconds:.1f} s {cost.what}" for cost in costs[part.name])
        lines.append(f"| {part.name} | {seconds(costs[part.name]):.0f} s | {part.limit_s} s | {of_it} |")
    return "\n".join([*lines, f"| all | {sum(map(seconds, costs.values())):.0f} s | {first.FIRST_S} s | |"]) + "\n"


def seconds(costs: list[Cost]) -> float:
    return sum(cost.seconds for cost in costs)


def compiling(machine: Machine) -> list[Cost]:
    kernels, processes = len(first.each_once(machine.kernels)), min(machine.cores, MAX_PROCESSES)
    return [
        Cost(COUNT_S, "to find out what is needed"),
        Cost(kernels * KERNEL_S / processes, f"{kernels} kernels in {processes} processes"),
    ]


def trials(machine: Machine) -> list[Cost]:
    return trying(machine, list(first.TRIED))


def trying(machine: Machine, names: list[str]) -> list[Cost]:
    """Return the costs of these trials, whose kernels have been compiled and whose results are not on record."""
    calls = sum(calls_compared(machine, name) for name in names)
    graphs = STEP_GRAPHS * len(names) * (len(decode_sizes(len(PROMPTS))) + len(mixed_sizes(PROMPTS[0])))
    steps = WHOLE_STEPS * len(names) * (len(CHUNKS) + len(DECODES))
    launches = OPERATIONS * (OPERATION_S + LAUNCH_S)  # of a layer or two: about as many as operations of a comparison
    return [
        Cost(calls * COMPARED_S, f"{calls} comparisons of kernels"),
        Cost(len(names) * RUNNER_S, f"{len(names)} small models"),
        Cost(graphs * SMALL_GRAPH_S + steps * launches, f"{steps} steps and {graphs} graphs of them"),
    ]


def calls_compared(machine: Machine, name: str) -> int:
    """Return how often a trial compares a kernel: each in every step."""
    kernels = {variant.kernel.fn.__name__ for variant in machine.kernels[name]}
    return len(kernels) * (len(CHUNKS) + len(DECODES))


def copies(machine: Machine) -> list[Cost]:
    moved = 2 * COPY_BYTES * (REPEATS + 1)
    return [Cost(moved / CARD.bytes_per_s, f"{moved / 1e9:.0f} GB")]


def products(machine: Machine) -> list[Cost]:
    flops = 2 * MATRIX**3 * (REPEATS + 1)
    return [Cost(flops / CARD.flops, f"{flops / 1e12:.0f} TFLOP")]


def one_engine(machine: Machine) -> list[Cost]:
    sizes, prompt = first.BATCHES, CASES["prefill 8B, 8192 tokens"]
    return [
        *starting(machine, "8B", max(sizes)),
        *(cost for size in sizes for cost in decoding("8B", size, parts.PROFILED_STEPS)),
        Cost(PROFILE_S * len(sizes), f"{len(sizes)} profiles"),
        Cost(4 * count(prompt).expected_s(CARD, prompt), f"4 prompts of {prompt.tokens} tokens"),
    ]


def experts(machine: Machine) -> list[Cost]:
    return [*starting(machine, "30B-A3B", 64), *decoding("30B-A3B", 64)]


def starting(machine: Machine, shape: str, seqs: int) -> list[Cost]:
    """Return the costs of an engine's start. seqs: its max_num_seqs."""
    weights = meta_model(shape).weight_bytes(1 << 20)
    graphs = len(decode_sizes(seqs)) + len(mixed_sizes(parts.PROMPT))
    launches = count(CASES[f"decode {shape}, batch 64"]).launches.total()
    return [
        Cost(NOISE * weights / CARD.bytes_per_s, f"{weights / 1e9:.0f} GB of random weights"),
        *trying(machine, [shape]),
        Cost(graphs * (GRAPH_S + 2 * launches * LAUNCH_S), f"{graphs} graphs of {launches} kernels, launched twice"),
    ]


def decoding(shape: str, seqs: int, profiled: int = 0) -> list[Cost]:
    """Return the costs of `parts.start_decoding` and of the steps after it."""
    case, steps = CASES[f"decode {shape}, batch {seqs}"], parts.WARM_STEPS + parts.STEPS + profiled
    prompts = seqs * prompt_flops(meta_model(shape).config, parts.CONTEXT) / CARD.flops / PROMPT_SHARE
    return [
        Cost(prompts, f"{seqs} prompts of {parts.CONTEXT} tokens"),
        Cost(steps * count(case).expected_s(CARD, case), f"{steps} steps of {seqs}"),
    ]


def tests(processes: int, tests: int, each_s: float, variants: int, machine: Machine) -> list[Cost]:
    return [
        Cost(PROCESS_S * max(1.0, processes / machine.cores), f"{processes} processes of tests"),
        Cost(variants * KERNEL_S / min(processes, machine.cores), f"{variants} kernels"),
        Cost(math.ceil(tests / processes) * each_s, f"{tests} tests, {each_s} s each"),
    ]


COSTS: dict[str, Callable[[Machine], list[Cost]]] = {
    "requirements": lambda machine: [],
    "kernels compiled": compiling,
    "kernels against plain torch, at real shapes": trials,
    "copy": copies,
    "matrix product, bf16": products,
    "8B, one engine": one_engine,
    "tests of kernels": partial(tests, first.KERNEL_PROCESSES, KERNEL_TESTS, KERNEL_TEST_S, TEST_VARIANTS),
    "tests of engines": partial(tests, first.ENGINE_PROCESSES, ENGINE_TESTS, ENGINE_TEST_S, 0),
    "decode 30B-A3B, batch 64": experts,
}
