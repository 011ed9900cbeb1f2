"""What adapters cost a step, and what loading one costs the streams that run meanwhile: `python -m benchmarks.lora`.

A batch has its rows divided among 1, 8 and 32 adapters, or has none, in turns, in one engine; and none in an engine
without adapters. Beside it stands what a server would give that merges adapters into the weights, as PEFT does: it
computes the rows of one adapter after those of another, in the engine without adapters, and has to merge and unmerge
between them; and vLLM's CPU backend, with `--vllm`, in processes of its own.

Then a number of streams run: beside requests without an adapter, beside requests for an adapter that is in a slot, and
beside the same requests for adapters of a higher rank that have to be loaded, one after another. Weights are random:
what is computed does not depend on their values.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file

from benchmarks.command import DtypeOption, JsonOption, print_report, run
from benchmarks.peer_servers import stop
from benchmarks.peers import SETTLE_S, preloaded
from benchmarks.small_shape import SHAPE
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.lora.adapter_files import open_adapter
from engine.model.config import ModelConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.sampling_params import SamplingParams

BATCH, PROMPT_LEN = 32, 8
ADAPTERS = (0, 1, 8, 32)  # in a batch
ANSWER = 128  # tokens of the answers for which adapters are merged
STREAMS, LOAD_RANK, LOADS = 16, 64, 4
NONE, VLLM = "engine without adapters", "vLLM: "


@dataclass(frozen=True, slots=True)
class LoRAReport:
    model: str
    dtype: str
    rank: int
    tokens_per_s: dict[str, list[float]]
    """Of each batch, a value for each turn."""
    gaps_ms: dict[str, list[float]]
    """P50 and P99 between tokens of a stream, by what runs beside it."""
    load_s: list[float]
    """How long each of these took."""
    merge_s: float
    """How long PEFT takes to merge an adapter and to unmerge it."""


def make_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> ModelAdapter:
    """Write an adapter of all linear layers, with random weights."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    sizes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer, (name, (outputs, inputs)) in itertools.product(range(model.num_layers), sizes.items()):
        prefix = f"base_model.model.model.layers.{layer}.{name}"
        tensors[f"{prefix}.lora_A.weight"] = 0.02 * torch.randn(rank, inputs, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = 0.02 * torch.randn(outputs, rank, generator=generator)
    folder.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in sizes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelAdapter(folder.name, str(folder), open_adapter(folder).digest)


def add(core: EngineCore, name: str, tokens: int, lora: ModelAdapter | None) -> None:
    prompt = random.Random(name).choices(range(3, core.model_config.vocab_size), k=PROMPT_LEN)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    core.add(GenerateRequest(request_id=name, prompt=prompt, params=params).asking(lora))


def merge_s(folder: Path, dtype: str, rank: int) -> float:
    """Return the seconds that PEFT takes to merge an adapter of all linear layers into a model, and to unmerge it."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    config = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    model, taken = peft.get_peft_model(base, config), []
    for _ in range(4):
        started = time.perf_counter()
        model.merge_adapter()
        model.unmerge_adapter()
        taken.append(time.perf_counter() - started)
    return min(taken)


def merged_tokens_per_s(core: EngineCore, adapters: int, merge_s: float, tokens: int) -> float:
    """Return the tokens per second of a batch whose adapters are merged one after the other."""
    group = BATCH // adapters
    group_s = merge_s + ANSWER * group / tokens_per_s(core, [], tokens, group)
    return ANSWER * BATCH / (adapters * group_s)


def tokens_per_s(core: EngineCore, adapters: list[ModelAdapter], tokens: int, batch: int = BATCH) -> float:
    """Tokens per second of a batch, once all of it decodes."""
    for i in range(batch):
        add(core, str(i), tokens, adapters[i % len(adapters)] if adapters else None)
    while len(core.scheduler.queue.running) < batch or any(r.num_output < 2 for r in core.scheduler.queue.running):
        core.step()
    count, started = 0, time.perf_counter()
    while core.has_work:
        count += sum(len(event.delta.token_ids) for event in core.step())
    return count / (time.perf_counter() - started)


class Vllm:
    """A process of vLLM."""

    def __init__(self, python: str, folder: Path, dtype: str, max_loras: int, rank: int):
        options = ["--max-loras", str(max_loras), "--max-lora-rank", str(rank)]
        self._vocab_size = ModelConfig.from_folder(folder).vocab_size
        environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())} | preloaded(python)
        command = [python, "-m", "benchmarks.lora_vllm", str(folder), dtype, *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def tokens_per_s(self, adapters: list[ModelAdapter], tokens: int) -> float:
        assert self._process.stdin
        asked = {
            "adapters": [lora.path for lora in adapters], "tokens": tokens, "batch": BATCH,
            "prompt_len": PROMPT_LEN, "vocab_size": self._vocab_size,
        }  # fmt: skip
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        stop(self._process)

    def _read(self) -> Any:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise SystemExit("vllm has ended; its own error stands above")


def gaps(core: EngineCore, tokens: int, adapters: Sequence[ModelAdapter | None]) -> tuple[list[float], list[float]]:
    """Return the seconds between tokens of streams, and those of each of further requests of one token, which come one
    after another, each for one of the adapters."""
    for i in range(STREAMS):
        add(core, f"stream {i}", tokens, None)
    while any(r.num_output < 1 for r in [*core.scheduler.queue.running, *core.scheduler.queue.waiting]):
        core.step()
    waiting, found, loads = list(adapters), [], []
    last, asked = time.perf_counter(), 0.0
    while any(name.startswith("stream") for name in core.scheduler.queue.live):
        if waiting and not asked:
            asked = time.perf_counter()
            add(core, f"other {len(waiting)}", 1, waiting.pop(0))
        events, now = core.step(), time.perf_counter()
        names = [event.request.request_id for event in events]
        if any(name.startswith("stream") for name in names):
            found.append(now - last)
            last = now
        if any(name.startswith("other") for name in names):
            loads.append(now - asked)
            asked = 0.0
    while core.has_work:
        core.step()
    return found, loads


def measure(folder: Path, dtype: str, rank: int, tokens: int, repetitions: int, vllm: str | None) -> LoRAReport:
    model = ModelConfig.from_folder(folder)
    adapters = [make_adapter(folder / f"{i}", model, rank, i) for i in range(max(ADAPTERS))]
    large = [make_adapter(folder / f"large {i}", model, LOAD_RANK, i) for i in range(LOADS)]
    merging = merge_s(folder, dtype, rank)
    options = EngineConfig(
        model=str(folder), dtype=dtype, load_format="dummy", max_num_seqs=BATCH, max_model_len=512,  # type: ignore[arg-type]
        num_gpu_blocks_override=2048
    )  # fmt: skip
    adapted = replace(options, enable_lora=True, max_loras=max(ADAPTERS), max_lora_rank=rank)
    with ExitStack() as engines:
        without, core = (engines.enter_context(closing(build_engine(one))) for one in (options, adapted))
        for i, lora in enumerate(adapters):  # there are slots for all: they stay
            add(core, f"first {i}", 1, lora)
        while core.has_work:
            core.step()
        rows: dict[str, Callable[[], float]] = {NONE: partial(tokens_per_s, without, [], tokens)}
        for count in ADAPTERS:
            rows[f"{count} adapters"] = partial(tokens_per_s, core, adapters[:count], tokens)
        for count in ADAPTERS[1:]:
            rows[f"{count} adapters, merged in turn"] = partial(merged_tokens_per_s, without, count, merging, tokens)
        if vllm is not None:
            peers = [Vllm(vllm, folder, dtype, max_loras, rank) for max_loras in (0, max(ADAPTERS))]
            for peer in peers:
                engines.callback(peer.close)
            rows[f"{VLLM}{NONE}"] = partial(peers[0].tokens_per_s, [], tokens)
            for count in ADAPTERS:
                rows[f"{VLLM}{count} adapters"] = partial(peers[1].tokens_per_s, adapters[:count], tokens)
        turns: dict[str, list[float]] = {name: [] for name in rows}
        for turn in range(repetitions + 1):
            for name, row in rows.items():
                time.sleep(SETTLE_S if vllm is not None else 0)
                speed = row()
                if turn:  # the first warms up
                    turns[name].append(speed)
    with closing(
        build_engine(replace(adapted, max_loras=2, max_lora_rank=LOAD_RANK, max_num_seqs=STREAMS + 1))
    ) as core:
        gaps(core, 8, [])
        plain, _ = gaps(core, 16 * tokens, [None] * LOADS)
        loaded, loads = gaps(core, 16 * tokens, large)
        held, _ = gaps(core, 16 * tokens, large[-1:] * LOADS)
    beside = {"without an adapter": plain, "for an adapter in a slot": held, "for adapters to load": loaded}
    found = {name: [1000 * float(np.percentile(times, share)) for share in (50, 99)] for name, times in beside.items()}
    return LoRAReport(str(folder), dtype, rank, turns, found, loads, merging)


def show_report(report: LoRAReport) -> None:
    table = make_table("batch of 32", "tokens/s", "of this engine without")
    for name, values in report.tokens_per_s.items():
        base = report.tokens_per_s[f"{VLLM}{NONE}" if name.startswith(VLLM) else NONE]
        ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
        table.add_row(name, figure(statistics.median(values)), f"{ratio:.2f}")
    merging = f"merging and unmerging one takes {report.merge_s:.2f} s, for answers of {ANSWER} tokens"
    show(f"adapters of rank {report.rank} on all linear layers, {report.dtype}; {merging}", table)
    table = make_table(f"{STREAMS} streams beside {LOADS} requests", "P50 between tokens, ms", "P99, ms")
    for name, (middle, high) in report.gaps_ms.items():
        table.add_row(name, figure(middle), figure(high))
    show(f"{len(report.load_s)} adapters of rank {LOAD_RANK}, {statistics.median(report.load_s):.2f} s each", table)


def main(
    *,
    model: Annotated[str, typer.Option(help="Folder with a config.json; none for the shape of SmolLM2-135M.")] = "",
    dtype: DtypeOption = "bfloat16",
    rank: Annotated[int, typer.Option(help="Of the adapters in a batch.")] = 16,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 24,
    repetitions: Annotated[int, typer.Option(help="Turns of each batch.")] = 3,
    vllm: Annotated[str | None, typer.Option(help="Python of an environment with vLLM.")] = None,
    as_json: JsonOption = False,
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shape = (Path(model) / "config.json").read_text(encoding="utf-8") if model else json.dumps(SHAPE)
        (folder / "config.json").write_text(shape, encoding="utf-8")
        print_report(measure(folder, dtype, rank, tokens, repetitions, vllm), as_json, show_report)


if __name__ == "__main__":
    run(main)
