"""What drafters with weights share with the model that they draft for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.layers.embedding import LMHead, TiedLMHead, VocabEmbedding
from engine.model.loader import EMBEDDING, HEAD, Loadable, fill_with_noise, load_weights, pack_weights
from engine.model.models.llama import Model
from engine.model.models.registry import build
from engine.model.tensor_names import NativeNames


@dataclass(frozen=True, slots=True)
class Target:
    """A model on rank 0, once its weights are loaded."""

    model: Model
    config: ModelConfig
    folder: Path
    tp: TPGroup
    dtype: torch.dtype
    device: torch.device
    block_size: int
    dummy: bool = False
    """Weights are random, as with the load format `dummy`; so are the drafter's."""

    def load(self, draft: Loadable, folder: Path) -> None:
        """Fill a drafter's module from the checkpoint in `folder`."""
        if self.dummy:
            fill_with_noise(draft)
        else:
            load_weights(draft, folder, TPGroup.single())
        pack_weights(draft)

    def vocabulary(self) -> Vocabulary:
        """Return the target with one rank. Ranks of a group hold a part of each layer, and drafts are made on rank 0
        alone, so there both are loaded once more."""
        if self.tp.size == 1:
            return self.model
        whole = build(lambda: WholeVocabulary(self.config), self.dtype, self.device)
        self.load(whole, self.folder)
        return whole


class Vocabulary(Protocol):
    """Embedding and output layer."""

    embed_tokens: VocabEmbedding
    lm_head: LMHead | None

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...


class WholeVocabulary(NativeNames, nn.Module):
    """Embedding and output layer of the target, on one rank."""

    unused: tuple[str, ...] = ()

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        single = TPGroup.single()
        self.embed_tokens = VocabEmbedding(cfg.vocab_size, cfg.hidden_size, single)
        self.lm_head: LMHead | None = LMHead(cfg.vocab_size, cfg.hidden_size, single)
        if cfg.tie_word_embeddings:
            self.lm_head = TiedLMHead(self.embed_tokens)

    def canonical_name(self, name: str) -> str | None:
        own = super().canonical_name(name)
        return own if own in (EMBEDDING, HEAD) else None

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        assert self.lm_head is not None
        return self.lm_head.best(hidden)


def check_fits(folder: Path, vocab_size: int, target: ModelConfig, hidden_size: int | None = None) -> None:
    """Raise ConfigError unless a drafter's checkpoint is made for a target of this vocabulary and, if it reads hidden
    states, of this width."""
    for what, own, needed in (
        ("a vocabulary", vocab_size, target.vocab_size),
        ("hidden states", hidden_size or target.hidden_size, target.hidden_size),
    ):
        if own != needed:
            raise ConfigError(
                "speculative.model", f"{folder} ({own})", f"made for {what} of size {needed}, as the model's"
            )
