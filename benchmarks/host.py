"""Microseconds of the host in a step on a GPU: planning, inputs, launch, results, events.

The device here computes nothing and is never waited for, so what is measured is all that the host does beside the card:
a GPU stands still while that takes longer than its step. CPU time of the thread, so that other processes do not count.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor

from benchmarks.command import JsonOption, print_json, run
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.devices.cuda_device import PinnedCopy
from engine.devices.device import Device, Run, StagedCopy
from engine.options.speculation import SpeculativeConfig
from engine.spec_decode.draft_length import SequenceDrafts, StepDrafts
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=None),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9, top_k=20, ignore_eos=True, max_tokens=None),
    "drafts": GREEDY,  # by n-grams, three for each sequence, all accepted
    "eagle3": GREEDY,  # three drafts of a head for each sequence, none accepted, since its weights are random
}
HEAD: dict[str, Any] = {
    **SHAPE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 1000,
    "eagle_aux_hidden_state_layer_ids": [0],
}  # fmt: skip
CONTEXT, UNMEASURED = 500, 40
PARTS = ("schedule", "prepare", "launch", "collect", "commit", "loop")


class IdleDevice(Device):
    """A device whose graphs compute nothing."""

    asynchronous = True

    def staged_copy(self) -> StagedCopy:
        return PinnedCopy(self.torch_device)

    def capture(self, run: Run) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        return run(), lambda: None, lambda: None


@contextmanager
def idle_device() -> Iterator[None]:
    """Let engines start on a device that computes nothing."""
    device = mock.patch("engine.runner.rank_setup.open_device", return_value=IdleDevice(torch.device("cpu")))
    plain = mock.patch("engine.model.ops.dispatch.cpu_kernels", return_value=False)  # they know no padding
    with device, plain:
        yield


@dataclass(frozen=True, slots=True)
class HostTime:
    """The least of all steps, in microseconds: what others do on the machine only adds to it."""

    sampling: str
    sequences: int
    parts: dict[str, float]  #: by the names in PARTS; loop is the rest
    total_us: float


def decoding_core(sampling: str, sequences: int, **options: Any) -> EngineCore:
    """Return an engine with so many new sequences, on a device that computes nothing. options: of EngineConfig."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head"
        head.mkdir()
        for path, fields in ((Path(folder), SHAPE), (head, HEAD)):
            (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        drafters = {
            "drafts": SpeculativeConfig(method="ngram", num_speculative_tokens=3),
            "eagle3": SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=3),
        }
        with idle_device():
            core = build_engine(EngineConfig(
                model=folder, load_format="dummy", max_num_seqs=sequences, num_gpu_blocks_override=32 * sequences,
                block_size=64,
                max_num_batched_tokens=max(1024, 8 * sequences), num_threads=1, enable_prefix_caching=True,
                speculative_config=drafters.get(sampling), **options,
            ))  # fmt: skip
    for i in range(sequences):
        prompt = [3 + (i + j) % 900 for j in range(CONTEXT)]
        core.add(GenerateRequest(request_id=str(i), prompt=prompt, params=SAMPLINGS[sampling]))
    return core


def measure(sampling: str, sequences: int, steps: int) -> HostTime:
    """Measure decode steps of so many sequences, one step planned ahead, as on a GPU."""
    core, drafts = decoding_core(sampling, sequences), sampling == "drafts"
    with idle_compute(core), drafts_of_any_cost():
        while any(request.num_output == 0 for request in core.scheduler.queue.live.values()):
            core.step()
        parts = time_steps(core, steps)
    assert len(core.scheduler.queue.running) == sequences, "some have ended"
    drafted = core.stats().record(SpecDecodeStats) or SpecDecodeStats()
    assert not drafts or drafted.num_accepted_tokens >= sequences * steps
    assert sampling != "eagle3" or drafted.num_draft_tokens >= 3 * sequences * steps
    core.close()
    return HostTime(sampling, sequences, parts, sum(parts.values()))


def step(core: EngineCore) -> None:
    """Let a step end. With drafts, a step is planned only once the step before has ended."""
    scheduler = core.scheduler
    ended = scheduler.totals.steps - len(scheduler.planned)
    while scheduler.totals.steps - len(scheduler.planned) == ended:
        core.step()


def time_steps(core: EngineCore, steps: int) -> dict[str, float]:
    """Return the least CPU time of each part, in microseconds."""
    for _ in range(UNMEASURED):
        step(core)
    spent = dict.fromkeys(PARTS, 0.0)
    core.scheduler.schedule = timed(core.scheduler.schedule, "schedule", spent)  # type: ignore[method-assign]
    core.scheduler.commit = timed(core.scheduler.commit, "commit", spent)  # type: ignore[method-assign]
    for name in ("prepare", "launch", "collect"):
        setattr(core.ranks.runner, name, timed(getattr(core.ranks.runner, name), name, spent))
    least = dict.fromkeys(PARTS, float("inf"))
    for _ in range(steps):
        started = time.thread_time()
        step(core)
        spent["loop"] = 1e6 * (time.thread_time() - started) - sum(spent.values())
        for part in PARTS:
            least[part] = min(least[part], spent[part])
            spent[part] = 0.0
    return least


@contextmanager
def idle_compute(core: EngineCore) -> Iterator[None]:
    """Leave out the head, and the choice of tokens that stands for a kernel; their calls stay."""
    core.ranks.runner.model.best = lambda hidden: (hidden.new_ones(len(hidden)), hidden.new_zeros(len(hidden)).long())  # type: ignore[method-assign]
    logits: dict[int, Tensor] = {}
    core.ranks.runner.model.logits = lambda hidden: logits.setdefault(len(hidden), torch.ones(len(hidden), 1000))  # type: ignore[method-assign]
    core.ranks.runner.sample_rows = lambda logits, random: logits.new_zeros(len(logits)).long()
    yield


@contextmanager
def drafts_of_any_cost() -> Iterator[None]:
    """Draft as many tokens as there may be, since a device that computes nothing shows no cost."""
    with (
        mock.patch.object(StepDrafts, "_least", return_value=-1.0),
        mock.patch.object(StepDrafts, "length", lambda step, acceptance, limit: limit),
        mock.patch.object(StepDrafts, "proposals", lambda step, acceptances, limit: limit),
        mock.patch.object(SequenceDrafts, "pause"),
    ):
        yield


def timed(method: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any) -> Any:
        started = time.thread_time()
        result = method(*args)
        spent[part] += 1e6 * (time.thread_time() - started)
        return result

    return call


def main(
    sequences: Annotated[str, typer.Option(help="Sequences that decode together; one or more numbers.")] = "64,256",
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Measure the host's µs per decode step on a device that computes nothing.

    Example: python -m benchmarks.host --sequences 64,256
    """
    results = [measure(sampling, int(n), steps) for sampling in SAMPLINGS for n in sequences.split(",")]
    if as_json:
        print_json([asdict(result) for result in results])
        return
    table = make_table("µs per step", *(f"{result.sampling} {result.sequences}" for result in results))
    for part in PARTS:
        table.add_row(part, *(figure(result.parts[part]) for result in results))
    table.add_section()
    table.add_row("total", *(figure(result.total_us) for result in results))
    show(f"CPU time of the host, the least of {steps} steps", table)


if __name__ == "__main__":
    run(main)
