"""The step that measures memory computes all that the largest step does."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.model.layers.linear import RowParallelLinear
from engine.options.speculation import SpeculativeConfig
from engine.parts.images.rank.images import Images
from engine.parts.speculation.rank.drafting import Drafting
from engine.runner.graphs.gpu_memory import free_gpu_memory
from engine.runner.graphs.warm_up import run_dummy_step
from engine.runner.model_runner import load_model
from engine.runner.rank_part import NO_PARTS
from engine.runner.rank_setup import RankSetup
from tests.engine.spec_decode.draft_checkpoints import DRAFT_VOCAB, VOCAB, PlainEagle3, write_authors
from tests.models import make_model

TOKENS, SEQS, DRAFTS = 30, 4, 3
MIB = 2**20


class FakeCuda:
    """A GPU's memory, of which `take` is in use for a moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.peak = 0
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.take(-self.peak))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (900 * MIB, 1000 * MIB))

    def take(self, size: int) -> None:
        self.peak = max(0, size)


def test_the_largest_image_takes_memory_from_the_cache(monkeypatch, tmp_path):
    make_model(tmp_path, "llama")
    limits = {"max_num_batched_tokens": TOKENS, "max_num_seqs": SEQS, "encoder_cache_size": 12, "enforce_eager": True}
    config = EngineConfig(model=str(tmp_path), dtype="float32", **limits)
    setup = RankSetup.of(config, ModelConfig.from_folder(tmp_path), tmp_path, TPGroup.single())
    cuda = FakeCuda(monkeypatch)

    def left(image_bytes: int) -> int:
        encoder: Any = SimpleNamespace(encode_example=lambda embeds: cuda.take(max(cuda.peak, embeds * image_bytes)))
        images = Images(setup)
        images.cache = encoder
        dummy_step = partial(run_dummy_step, setup, load_model(setup, NO_PARTS), dummy_steps=[images.dummy_step])

        def largest(tokens: int, seqs: int) -> None:
            cuda.take(max(cuda.peak, MIB))
            dummy_step(tokens, seqs)

        return free_gpu_memory(setup, largest).size

    assert left(1) - left(MIB) == 12 * MIB - MIB, "the larger of image and step"


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_step_that_measures_memory_has_the_drafter_see_every_token_and_guess_for_every_sequence(method, tmp_path):
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    target.mkdir()
    drafter.mkdir()
    make_model(target, "llama", vocab_size=VOCAB, num_hidden_layers=8)
    if method == "eagle3":
        write_authors(drafter, PlainEagle3(False, DRAFT_VOCAB))
    else:
        make_model(drafter, "qwen3", vocab_size=VOCAB)
    options = SpeculativeConfig(method=method, model=str(drafter), num_speculative_tokens=DRAFTS)
    limits = {"max_num_batched_tokens": TOKENS, "max_num_seqs": SEQS}
    config = EngineConfig(model=str(target), speculative_config=options, dtype="float32", **limits)
    setup = RankSetup.of(config, ModelConfig.from_folder(target), target, TPGroup.single())
    model, drafting = load_model(setup, NO_PARTS), Drafting(setup)
    drafting.attach(model)
    found = drafting.drafter
    assert found is not None
    rows: list[int] = []
    modules = [
        module for value in vars(found).values() if isinstance(value, torch.nn.Module) for module in value.modules()
    ]

    def note(module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rows.append(len(out))

    first = next(module for module in modules if isinstance(module, RowParallelLinear))
    first.register_forward_hook(note)
    run_dummy_step(setup, model, TOKENS, SEQS, [drafting.dummy_step])
    # a draft model also computes the tokens just sampled, so that its budget leaves the last sequence for later
    guessed = SEQS if method == "eagle3" else SEQS - 1
    assert rows == [TOKENS, *[guessed] * (DRAFTS - 1)]
