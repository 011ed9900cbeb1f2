"""Runs a model over hand-made batches: chunks, several sequences at once, blocks scattered over the cache."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.model.batch import Batch, KVGroup, split
from engine.model.config import ModelConfig
from engine.model.fixed_order import pad_layers
from engine.model.loader import load_weights, pack_weights
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from engine.model.state import StateBatch, state_specs
from tests.state_batches import garbage

SLOTS = 16  # sequences in a model with recurrent layers


class ByHand:
    """Sequences with a paged cache of their own; what the runner does, without its bookkeeping."""

    def __init__(
        self, model: nn.Module, cfg: ModelConfig, *, num_blocks: int = 128, block_size: int = 4, tp: ShardPlan
    ):
        self.model = model
        self.block_size = block_size
        # NaN where nothing was written: whatever reads it shows
        self.kv_caches = [
            torch.full((num_blocks, *group.block_shape(block_size, tp.size)), torch.nan, dtype=dtype_of(model))
            for group in cfg.kv_groups
        ]
        self.kv_scales: list[Tensor | None] = [None] * len(self.kv_caches)
        dtype = str(dtype_of(model)).removeprefix("torch.")
        self.states = [garbage(spec, SLOTS) for spec in state_specs(cfg.recurrent, dtype, tp.size)]
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    def step(self, tokens: dict[int, list[int]]) -> Tensor:
        """Compute the next tokens of some sequences: sequence -> tokens. Returns logits [all tokens, vocab]."""
        positions, slots, query_start, kv_len = [], [], [0], []
        for seq, ids in tokens.items():
            start = self.computed.get(seq, 0)
            self.computed[seq] = end = start + len(ids)
            blocks = self.blocks.setdefault(seq, [])
            while len(blocks) * self.block_size < end:
                blocks.append(self.free.pop())
            positions += range(start, end)
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)]
            query_start.append(query_start[-1] + len(ids))
            kv_len.append(end)
        width = max(len(self.blocks[seq]) for seq in tokens)
        table = [self.blocks[seq] + [-1] * (width - len(self.blocks[seq])) for seq in tokens]
        single, chunks = split([len(ids) for ids in tokens.values()], kv_len)
        first, *others = [
            KVGroup(torch.tensor(slots), torch.tensor(table, dtype=torch.int32), cache, scales)
            for cache, scales in zip(self.kv_caches, self.kv_scales, strict=True)
        ]
        batch = Batch(
            positions=torch.tensor(positions),
            slot_mapping=first.slot_mapping,
            query_start=torch.tensor(query_start, dtype=torch.int32),
            kv_len=torch.tensor(kv_len, dtype=torch.int32),
            block_table=first.block_table,
            kv_cache=first.kv_cache,
            single=single,
            chunks=chunks,
            kv_scales=first.kv_scales,
            other_groups=tuple(others),
            states=self.state_batch(list(tokens)),
        )
        with torch.inference_mode():
            hidden = self.model(torch.tensor([t for ids in tokens.values() for t in ids]), batch)
            return self.model.logits(hidden)

    def state_batch(self, seqs: list[int]) -> StateBatch | None:
        if not self.states:
            return None
        slots, none = torch.tensor(seqs, dtype=torch.int32), torch.full((len(seqs),), -1, dtype=torch.int32)
        return StateBatch(self.states, slots, none, none)

    def generate(self, prompts: list[list[int]], max_tokens: int, chunk: int) -> list[list[int]]:
        """Greedy. Sequence i starts at step i, and prompts go in chunks, so steps mix prefill and decode."""
        pending = dict(enumerate(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        step = 0
        while pending:
            tokens = {seq: ids[:chunk] for seq, ids in pending.items() if seq <= step}
            ends = torch.tensor([len(ids) for ids in tokens.values()]).cumsum(0) - 1
            chosen = self.step(tokens)[ends].argmax(-1).tolist()
            for (seq, ids), token in zip(tokens.items(), chosen, strict=True):
                pending[seq] = pending[seq][len(ids) :]
                if not pending[seq]:
                    outputs[seq].append(token)
                    pending[seq] = [token]
                    if len(outputs[seq]) == max_tokens:
                        del pending[seq]
            step += 1
        return outputs


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def load_by_hand(
    folder: Path, tp: ShardPlan | None = None, dtype: torch.dtype = torch.float32, quantization: str | None = None
) -> ByHand:
    """The model of a folder, or this rank's part of it."""
    tp = tp or ShardPlan()
    cfg = ModelConfig.from_folder(folder, quantization)
    model = build_model(cfg, tp, dtype, "cpu")
    if tp.fixed_order:
        pad_layers(model)
    load_weights(model, folder, tp.ranks)
    pack_weights(model)
    return ByHand(model, cfg, tp=tp)
