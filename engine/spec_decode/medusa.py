"""Medusa heads, arXiv:2401.10774: each guesses one further token from the target's last hidden state alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.checkpoint.fields import Fields, reading
from engine.model.checkpoint.folder import read_json
from engine.model.layers.embedding import LMHead
from engine.model.layers.linear import ReplicatedLinear
from engine.model.loader import tensors_by_file
from engine.model.models.registry import build
from engine.model.shard import ShardPlan
from engine.spec_decode.drafter import DraftInputs, ModelDrafter
from engine.spec_decode.target import Target, check_fits

# In the authors' checkpoints `0.0.linear.weight` is the first layer of head 0, and `0.1.weight` its output layer.
AUTHORS = re.compile(r"(\d+)\.(\d+)(\.linear)?\.(weight|bias)")


class MedusaHeads(nn.Module):
    """Maps hidden [rows, hidden] to [rows, heads, hidden], from which an output layer computes each head's logits."""

    unused: tuple[str, ...] = ()

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, bias: bool, vocab_size: int | None):
        """num_layers: residual layers per head. vocab_size: size of the vocabulary of the heads' own output layers;
        None to use the target's output layer instead."""
        super().__init__()
        heads = range(num_heads)
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        #: First layers of all heads, merged because they share their input.
        self.first = ReplicatedLinear(hidden_size, {f"blocks.{i}.layers.0": hidden_size for i in heads}, bias)
        #: Further layers, by head, then by layer.
        self.blocks: Any = nn.ModuleList(
            nn.ModuleList(ReplicatedLinear(hidden_size, hidden_size, bias) for _ in range(1, num_layers)) for _ in heads
        )
        single = ShardPlan()
        self.lm_heads: Any = nn.ModuleList(LMHead(vocab_size, hidden_size, single) for _ in heads if vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden[:, None] + F.silu(self.first(hidden)).unflatten(1, (-1, self.hidden_size))
        if self.num_layers == 1:
            return x
        rows = list(x.unbind(1))
        for layers in zip(*self.blocks, strict=True):
            rows = [row + F.silu(layer(row)) for row, layer in zip(rows, layers, strict=True)]
        return torch.stack(rows, dim=1)

    def checkpoint_name(self, path: str) -> str:
        """Return vLLM's name of a tensor."""
        head, _, rest = path.removeprefix("blocks.").partition(".")
        layer, _, kind = rest.partition(".")
        if path.startswith("blocks."):
            return f"blocks.{head}.layers.{int(layer) + 1}.{kind}"
        return path.removeprefix("first.")

    def canonical_name(self, name: str) -> str | None:
        name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        if found := AUTHORS.fullmatch(name):
            head, layer, is_residual, kind = found.groups()
            name = f"blocks.{head}.layers.{layer}.{kind}" if is_residual else f"lm_heads.{head}.{kind}"
        return None if name.startswith("lm_heads.") and not len(self.lm_heads) else name


class MedusaDrafter(ModelDrafter):
    def __init__(self, folder: Path, target: Target, num_tokens: int):
        """Load the heads in `folder`. num_tokens: tokens to draft per sequence. Raises ConfigError or ModelFolderError
        if the heads do not fit the target, or if there are fewer than `num_tokens`."""
        raw, cfg = Fields(read_json(folder, "config.json")), target.config
        with reading(folder, "config.json"):
            num_heads = raw.get("num_heads") or raw.get("medusa_num_heads") or 5
            num_layers = raw.get("num_hidden_layers") or raw.get("medusa_num_layers") or 1
            vocab_size, hidden_size = raw.get("vocab_size", cfg.vocab_size), raw.get("hidden_size", cfg.hidden_size)
            known, shares = raw.get("truncated_vocab_size") or vocab_size, bool(raw.get("original_lm_head"))
        check_fits(folder, vocab_size, cfg, hidden_size)
        if known != vocab_size:
            raise ConfigError(
                "speculative_config.model", str(folder), f"heads for all {vocab_size} tokens; these are for {known}"
            )
        if num_tokens > num_heads:
            limit = f"at most {num_heads}, the number of heads in {folder}"
            raise ConfigError("speculative_config.num_speculative_tokens", num_tokens, limit)
        names = [] if target.dummy else [name for found in tensors_by_file(folder).values() for name in found]
        bias = any(name.endswith(".bias") for name in names)
        size = None if shares else vocab_size
        self._heads = build(
            lambda: MedusaHeads(num_heads, num_layers, cfg.hidden_size, bias, size), target.dtype, target.device
        )
        target.load(self._heads, folder)
        self._vocabulary = target.vocabulary() if shares else None

    def propose(self, step: DraftInputs) -> Tensor:
        count = step.plan.num_drafts
        if not step.entries:
            return step.last_rows.new_empty(0, count)
        x = self._heads(step.hidden[step.last_rows])[:, :count]
        if self._vocabulary is not None:
            return self._vocabulary.best(x.flatten(0, 1))[1].view(len(x), count)
        heads = zip(self._heads.lm_heads, x.unbind(1), strict=False)
        return torch.stack([head.best(rows)[1] for head, rows in heads], dim=1)
