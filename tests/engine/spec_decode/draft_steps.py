"""Steps of a target as its drafter sees them, without a target: hidden states are random."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.distributed.tp_group import TPGroup
from engine.model.batch import Batch, split
from engine.model.config import ModelConfig
from engine.model.loader import load_weights, pack_weights
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from engine.spec_decode.drafter import DraftInputs, ModelDrafter
from engine.spec_decode.target import Target
from engine.wire.plan import BlockChange, NewSequence, StepPlan
from engine.wire.sampling_params import SamplingParams

BLOCK, NUM_BLOCKS, MAX_LEN = 4, 40, 64


def load_target(folder: Path) -> Target:
    cfg, cpu = ModelConfig.from_folder(folder), torch.device("cpu")
    model = build_model(cfg, ShardPlan(), torch.float32, cpu)
    load_weights(model, folder, TPGroup.single())
    pack_weights(model)
    return Target(model, cfg, folder, TPGroup.single(), torch.float32, cpu, BLOCK)


class DraftedSequences:
    """Sequences whose tokens are known, fed to a drafter in steps of any size. Each has blocks of its own, in mixed
    order."""

    def __init__(self, drafter: ModelDrafter, tokens: list[list[int]], hidden: list[Tensor], aux: list[Tensor] | None):
        """hidden: [len(tokens), hidden] of each sequence; aux: the same of the layers that the drafter reads."""
        self.drafter, self.tokens, self.hidden, self.aux = drafter, tokens, hidden, aux
        drafter.allocate(NUM_BLOCKS)
        per_sequence = NUM_BLOCKS // len(tokens)
        mixed = np.random.default_rng(0).permutation(NUM_BLOCKS)
        self.blocks = [mixed[i * per_sequence : (i + 1) * per_sequence].tolist() for i in range(len(tokens))]
        self.tables = torch.tensor(self.blocks, dtype=torch.int32)
        self.known = [0] * len(tokens)

    def step(
        self,
        counts: dict[int, int],
        num_drafts: int,
        wrong: dict[int, list[int]] | None = None,
        room: int = 16,
        added: Collection[int] = (),
    ) -> Iterator[tuple[int, list[int]]]:
        """Compute `counts` more tokens of each sequence, and yield the drafts of those that sample: all of them.

        wrong: drafts that are rejected, computed behind the others. room: tokens after these that have blocks.
        added: sequences that enter their slot, as they do with their first token.
        """
        wrong = wrong or {}
        slots = list(counts)
        starts = [self.known[slot] for slot in slots]
        history = torch.zeros(len(self.tokens), MAX_LEN, dtype=torch.int32)
        rows, added, changes = [], [], []
        for slot, start in zip(slots, starts, strict=True):
            end = start + counts[slot]
            if start == 0 or slot in added:
                added.append(NewSequence(slot, self.tokens[slot][:end], end, SamplingParams(), 0))
            changes.append(BlockChange(slot, 0, self.blocks[slot][: -(-(end + room) // BLOCK)]))
            history[slot, : end + 1] = torch.tensor(self.tokens[slot][: end + 1])
            rows += [(slot, p) for p in range(start, end + len(wrong.get(slot, ())))]
            history[slot, end + 1 : end + 1 + len(wrong.get(slot, ()))] = torch.tensor(wrong.get(slot, ())).int()
            self.known[slot] = end
        sizes = [counts[slot] + len(wrong.get(slot, ())) for slot in slots]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        plan = StepPlan(0, added, changes, slots, starts, sizes, [True] * len(slots), num_drafts=num_drafts)
        query_start = np.concatenate([[0], np.cumsum(sizes)])
        single, chunks = split(sizes, ends)
        positions = torch.tensor([p for _, p in rows])
        seqs = torch.tensor([slot for slot, _ in rows])
        cells = self.tables[seqs, positions // BLOCK].long() * BLOCK + positions % BLOCK
        batch = Batch(
            positions=positions,
            slot_mapping=cells,
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            kv_len=torch.tensor(ends, dtype=torch.int32),
            block_table=self.tables[slots],
            kv_cache=torch.empty(0),
            single=single,
            chunks=chunks,
        )
        gather = [(slot, min(p, len(self.hidden[slot]) - 1)) for slot, p in rows]
        last = [int(query_start[i]) + counts[slot] - 1 for i, slot in enumerate(slots)]
        inputs = DraftInputs(
            plan=plan,
            entries=list(range(len(slots))),
            batch=batch,
            tables=batch.block_table,
            next_ids=history[seqs, positions + 1].long(),
            last_rows=torch.tensor(last),
            hidden=torch.stack([self.hidden[slot][p] for slot, p in gather]),
            aux_hidden=None if self.aux is None else torch.stack([self.aux[slot][p] for slot, p in gather]),
            history=history,
        )
        self.drafter.follow(plan)
        if not num_drafts and not self.drafter.reads_all:
            return
        with torch.inference_mode():
            drafts = self.drafter.propose(inputs)
        assert drafts.shape == (len(slots), num_drafts)
        yield from zip(slots, drafts.tolist(), strict=True)
