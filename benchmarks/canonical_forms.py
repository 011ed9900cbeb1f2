"""The cost of one form for prompts and decode, which keeps the bits, against the forms that need not keep them.

    python -m benchmarks.canonical_forms

Linear attention: a decoded token is a row of the chunkwise form, which reads the state and keeps rows. The other form
is the recurrence, which reads and writes the state for every token; here it is a kernel of the same kind. Latent
attention: prompts are computed with absorbed projections, as decode is. The other form expands keys and values of each
head, and then attends as any model does. One thread, by its CPU time; the forms take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from benchmarks.command import JsonOption, print_report, run
from cluster.terminal.tables import figure, make_table, show
from engine.model.batch import Batch, split
from engine.model.layers.latent_attention import of_heads
from engine.model.ops import linear
from engine.model.ops.cpu import attention
from engine.model.ops.cpu.kernel import CpuKernel, as_f32, device_function, exp, kernel, take
from engine.model.ops.elementwise.norms import unit_q_and_k
from engine.model.ops.recurrent.linear_attention import select
from engine.model.state import CHUNK, Shape, StateBatch, StateSpec, allocate

EPS = 1e-6
BLOCK_SIZE = 16
MEMORY_MIB = 96  # of states, more than caches hold


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Linear attention in one layer."""

    name: str
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    delta: bool = True  #: whether what the state says of a key is replaced

    def spec(self) -> StateSpec:
        heads, key_heads = self.heads, self.key_heads
        rows: dict[str, Shape] = {
            "keys": ((key_heads, CHUNK, self.key_dim), "float32"),
            "values": ((heads, CHUNK, self.value_dim), "float32"),
            "decays": ((heads, CHUNK, 1), "float32"),
        }
        return StateSpec({"state": ((heads, self.key_dim, self.value_dim), "float32")}, rows)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention in one layer."""

    name: str
    heads: int = 16
    rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128


RECURRENT = [
    RecurrentShape("Gated DeltaNet (Qwen3-Next)", 16, 32, 128, 128),
    RecurrentShape("Mamba-2 (Nemotron 3 Nano)", 8, 64, 128, 64, delta=False),
]
LATENT = [LatentShape("MLA (DeepSeek V2 Lite)")]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of the repetitions, in microseconds of CPU time for a layer, and how much longer ours took in each."""

    layer: str
    work: str
    ours_us: float
    other: str
    other_us: float
    ratios: list[float]


@dataclass(frozen=True, slots=True)
class FormsReport:
    repetitions: int
    comparisons: list[Comparison]


def compare(layer: str, work: str, ours: Callable[[], Any], other: str, theirs: Callable[[], Any], repetitions: int,
            calls: int = 1) -> Comparison:  # fmt: skip
    """calls: layers and tokens that each of the two computes."""
    times: list[list[float]] = [[], []]
    for repetition in range(repetitions + 1):  # the first compiles
        for form, own in zip((ours, theirs), times, strict=True):
            started = time.thread_time()
            form()
            if repetition:
                own.append((time.thread_time() - started) * 1e6 / calls)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return Comparison(layer, work, statistics.median(times[0]), other, statistics.median(times[1]), ratios)


# -- linear attention --------------------------------------------------------------------------------------


@device_function
def recurrence_rows(args: Any) -> None:
    """args: q, k, v, decay, beta, out, state, sequences, the tokens of each, heads, k_heads, d_k, d_v."""
    seqs, tokens, heads, key_heads, key_dim, value_dim = args[8], args[9], args[10], args[11], args[12], args[13]
    known = np.empty(value_dim, np.float32)
    while True:
        item = take(args, 1)
        if item >= seqs * heads:
            break
        state = as_f32(args[7] + 4 * item * key_dim * value_dim)
        for token in range(item // heads * tokens, (item // heads + 1) * tokens):
            at = token * heads + item % heads
            shared = token * key_heads + item % heads // (heads // key_heads)
            q, k = as_f32(args[1] + 4 * shared * key_dim), as_f32(args[2] + 4 * shared * key_dim)
            v, out = as_f32(args[3] + 4 * at * value_dim), as_f32(args[6] + 4 * at * value_dim)
            past = exp(as_f32(args[4])[at])
            if args[5]:
                for j in range(value_dim):
                    known[j] = np.float32(0.0)
                for i in range(key_dim):
                    for j in range(value_dim):
                        known[j] += k[i] * state[i * value_dim + j]
                share = as_f32(args[5])[at]
                for j in range(value_dim):
                    known[j] = share * (v[j] - past * known[j])
            else:
                for j in range(value_dim):
                    known[j] = v[j]
            for j in range(value_dim):
                out[j] = np.float32(0.0)
            for i in range(key_dim):
                for j in range(value_dim):
                    moved = past * state[i * value_dim + j] + k[i] * known[j]
                    state[i * value_dim + j] = moved
                    out[j] += q[i] * moved


@kernel
def recurrence_f32(args: Any) -> None:
    recurrence_rows(args)


RECURRENCE = CpuKernel({torch.float32: recurrence_f32})


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, seqs: int, scale: float
) -> Tensor:
    """The arguments of `linear_attention`; state: [seqs, heads, d_k, d_v], which this moves."""
    q, k = (x.contiguous() for x in unit_q_and_k(q, k, scale, EPS))
    out, (heads, value_dim), (key_heads, key_dim) = torch.empty_like(v), v.shape[1:], k.shape[1:]
    RECURRENCE.launch(
        torch.float32, seqs * heads, q, k, v, decay, 0 if beta is None else beta, out, state, seqs, len(v) // seqs,
        heads, key_heads, key_dim, value_dim,
    )  # fmt: skip
    return out


def state_batch(seqs: int, start: int, count: int) -> Batch:
    """`seqs` sequences that compute `count` tokens each from position `start` on."""
    none, no_save = torch.empty(0), torch.full((seqs,), -1, dtype=torch.int32)
    kv_len = torch.full((seqs,), start + count, dtype=torch.int32)
    single, chunks = split([count] * seqs, kv_len)
    return Batch(
        positions=none, slot_mapping=none, block_table=none, kv_cache=none, single=single, chunks=chunks, kv_len=kv_len,
        query_start=count * torch.arange(seqs + 1, dtype=torch.int32),
        states=StateBatch([], torch.arange(seqs, dtype=torch.int32), no_save, no_save),
    )  # fmt: skip


def random_rows(shape: RecurrentShape, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v, decay and beta."""
    q, k = (torch.randn(tokens, shape.key_heads, shape.key_dim) for _ in range(2))
    decay = -0.1 * torch.rand(tokens, shape.heads, 1)
    beta = torch.rand(tokens, shape.heads) if shape.delta else None
    return q, k, torch.randn(tokens, shape.heads, shape.value_dim), decay, beta


def compare_decode(shape: RecurrentShape, seqs: int, repetitions: int) -> Comparison:
    """Decode one chunk, its border included, in as many layers as exceed the caches."""
    attend = select(shape.key_dim, shape.value_dim, 1, torch.device("cpu"))
    spec = shape.spec()
    count = max(2, MEMORY_MIB * 2**20 // (seqs * spec.kept_bytes))
    _, layers = allocate([spec] * count, seqs, 0, "cpu")
    for states in layers:
        for tensor in states.values():
            tensor.fill_(0.01)
    moved = [states["state"].contiguous() for states in layers]
    rows, scale = random_rows(shape, seqs), shape.key_dim**-0.5

    def canonical() -> None:
        for position in range(CHUNK, 2 * CHUNK):
            batch = state_batch(seqs, position, 1)
            for states in layers:
                attend(*rows, states, batch, scale, EPS)

    def recurrent() -> None:
        for _ in range(CHUNK):
            for state in moved:
                recurrence(*rows, state, seqs, scale)

    work = f"{seqs} sequence{'s' * (seqs > 1)} decode{'s' * (seqs == 1)}"
    return compare(shape.name, work, canonical, "recurrence", recurrent, repetitions, count * CHUNK)


def compare_prompt(shape: RecurrentShape, tokens: int, repetitions: int) -> list[Comparison]:
    attend, scale = select(shape.key_dim, shape.value_dim, 1, torch.device("cpu")), shape.key_dim**-0.5
    _, (states,) = allocate([shape.spec()], 1, 0, "cpu")
    rows, state = random_rows(shape, tokens), torch.zeros(1, shape.heads, shape.key_dim, shape.value_dim)

    def canonical() -> Tensor:
        return attend(*rows, states, state_batch(1, 0, tokens), scale, EPS)

    def recurrent() -> Tensor:
        return recurrence(*rows, state.zero_(), 1, scale)

    torch.testing.assert_close(canonical(), recurrent(), atol=1e-3, rtol=1e-3)
    name, work = shape.name, f"a prompt of {tokens:,}"
    found = [compare(name, work, canonical, "recurrence", recurrent, repetitions)]
    if shape.delta:
        q, k, v, decay, beta = rows
        assert beta is not None
        group = shape.heads // shape.key_heads

        def torch_form() -> Tensor:
            q_, k_ = (x.repeat_interleave(group, 1)[None] for x in (q, k))
            out, _ = qwen.torch_chunk_gated_delta_rule(
                q_, k_, v[None], decay[None, ..., 0], beta[None], use_qk_l2norm_in_kernel=True
            )
            return out

        found.append(compare(name, work, canonical, "transformers, chunkwise", torch_form, repetitions))
    return found


# -- latent attention --------------------------------------------------------------------------------------


def paged_batch(cached: int, tokens: int, heads: int, parts: int, head_dim: int) -> Batch:
    """One sequence that computes `tokens` tokens after `cached` ones, whose blocks lie in order."""
    length = cached + tokens
    blocks, positions = -(-length // BLOCK_SIZE), torch.arange(cached, length)
    single, chunks = split([tokens], [length])
    return Batch(
        positions=positions, slot_mapping=positions, single=single, chunks=chunks,
        query_start=torch.tensor([0, tokens], dtype=torch.int32), kv_len=torch.tensor([length], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        kv_cache=torch.full((blocks, 1, parts, heads, BLOCK_SIZE, head_dim), 0.01, dtype=torch.bfloat16),
    )  # fmt: skip


def compare_latent(shape: LatentShape, cached: int, tokens: int, repetitions: int) -> Comparison:
    """Attention with the projections of latents to keys and values, and of nothing else, which both forms share."""
    heads, rank, nope, value = shape.heads, shape.rank, shape.nope_dim, shape.value_dim
    size, scale, length = nope + shape.rope_dim, (nope + shape.rope_dim) ** -0.5, cached + tokens
    q = torch.randn(tokens, heads, size).bfloat16()
    latents, rotated = torch.randn(length, rank).bfloat16(), torch.randn(length, 1, shape.rope_dim).bfloat16()
    weight = (torch.randn(heads * (nope + value), rank) * rank**-0.5).bfloat16()
    of_head = weight.unflatten(0, (heads, -1))
    to_keys = [linear.pack(head[:nope].T.contiguous()) for head in of_head]
    to_values = [linear.pack(head[nope:].contiguous()) for head in of_head]
    expand = linear.pack(weight)
    absorbed = paged_batch(cached, tokens, 1, 1, rank + shape.rope_dim)
    absorbed.kv_cache.view(-1, rank + shape.rope_dim)[:length] = torch.cat((latents, rotated[:, 0]), -1)
    expanded = paged_batch(cached, tokens, heads, 2, size)

    def ours() -> Tensor:
        queries = torch.cat((of_heads(q[..., :nope], to_keys), q[..., nope:]), -1)
        return of_heads(attention.latent_attention(queries, absorbed, 0, scale, rank), to_values)

    def other() -> Tensor:
        k, v = linear.linear(latents, expand).unflatten(-1, (heads, -1)).split((nope, value), -1)
        k = torch.cat((k, rotated.expand(-1, heads, -1)), -1)
        k, v = (torch.nn.functional.pad(x, (0, size - x.shape[-1])).transpose(0, 1) for x in (k, v))
        spare = -length % BLOCK_SIZE
        for part, x in enumerate((k, v)):
            x = torch.nn.functional.pad(x, (0, 0, 0, spare)).unflatten(1, (-1, BLOCK_SIZE))
            expanded.kv_cache[:, 0, part] = x.transpose(0, 1)
        return attention.paged_attention(q, expanded, 0, scale)[..., :value]

    torch.testing.assert_close(ours().float(), other().float(), atol=0.05, rtol=0.05)
    work = f"{tokens:,} tokens" + (f" after {cached:,}" if cached else "")
    return compare(shape.name, work, ours, "expanded", other, repetitions)


def measure(*, repetitions: int = 7, prompt: int = 1024, sequences: tuple[int, ...] = (1, 16)) -> FormsReport:
    """prompt: tokens; latent attention also computes four times as many, and half as many after them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = []
    with torch.inference_mode():
        for shape in RECURRENT:
            found += [compare_decode(shape, seqs, repetitions) for seqs in sequences]
            found += compare_prompt(shape, prompt, repetitions)
        for latent in LATENT:
            for cached, tokens in ((0, prompt // 4), (0, prompt), (0, 4 * prompt), (4 * prompt, prompt // 2)):
                found.append(compare_latent(latent, cached, tokens, repetitions))
    return FormsReport(repetitions, found)


def show_report(report: FormsReport) -> None:
    table = make_table("layer", "work", "ours, µs", "other form", "its µs", "ours / its", "of", "to")
    for one in report.comparisons:
        low, middle, high = min(one.ratios), statistics.median(one.ratios), max(one.ratios)
        table.add_row(
            one.layer, one.work, figure(one.ours_us, 0), one.other, figure(one.other_us, 0), figure(middle, 2),
            figure(low, 2), figure(high, 2),
        )  # fmt: skip
    show(f"one layer, one thread, CPU time: medians of {report.repetitions} repetitions in turns", table)


def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Times that each form is measured.")] = 7,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of a prompt.")] = 1024,
    as_json: JsonOption = False,
) -> None:
    """Measure forms that keep the bits against those that need not."""
    print_report(measure(repetitions=repetitions, prompt=prompt), as_json, show_report)


if __name__ == "__main__":
    run(main)
