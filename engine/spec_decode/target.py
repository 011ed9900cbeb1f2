"""The target model, as drafters with weights use it."""

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
from engine.model.loader import Loadable, load_weights, pack_weights
from engine.model.models.llama import Model
from engine.model.models.registry import build
from engine.model.noise import fill_with_noise
from engine.model.shard import ShardPlan
from engine.model.tensor_names import NativeNames

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Target:
    """A model with loaded weights, on the first rank of the last stage."""

    model: Model
    config: ModelConfig
    folder: Path
    tp: TPGroup
    dtype: torch.dtype
    device: torch.device
    block_size: int
    dummy: bool = False
    """Whether the target's weights are random (load format `dummy`); the drafter's weights are then random too."""

    def load(self, draft: Loadable, folder: Path) -> None:
        """Fill a drafter's module with weights from the checkpoint in `folder`."""
        if self.dummy:
            fill_with_noise(draft)
        else:
            load_weights(draft, folder, TPGroup.single())
        pack_weights(draft)

    def vocabulary(self) -> Vocabulary:
        """Return the target's whole embedding and output layer. With one rank these are the target's own layers. With
        several ranks, each has only a part of every layer, and the last of several stages may have no embedding; then
        both layers are loaded again."""
        if self.tp.size == 1 and self.config.stage.has_embedding:
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
        single = ShardPlan()
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
    """Raise ConfigError unless a drafter's checkpoint fits a target of this vocabulary size and, if it reads hidden
    states, of this hidden size."""
    for what, own, needed in (
        ("a vocabulary", vocab_size, target.vocab_size),
        ("hidden states", hidden_size or target.hidden_size, target.hidden_size),
    ):
        if own != needed:
            raise ConfigError(
                "speculative_config.model",
                f"{folder} ({own})",
                f"made for {what} of size {needed}, which is the model's",
            )
