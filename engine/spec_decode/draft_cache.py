"""KV cache of a drafter. Its blocks have the same ids as those of the target's first KV cache group, which keeps all
tokens, so block tables, prefix cache and preemption are shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.devices.device import Device, copy_to
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.spec_decode.draft_graphs import DraftGraphs, DraftRows
from engine.spec_decode.drafter import DraftInputs, ModelDrafter
from engine.spec_decode.target import Target
from engine.wire.plan import StepPlan

Forward = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Tensor]]
"""Token ids [n], the hidden states of the pass before [n, hidden], and the ids' batch -> the most likely tokens after
them, and new hidden states."""


class DraftCache:
    """The cache tensor, and the number of blocks that each slot has."""

    def __init__(self, cfg: ModelConfig, target: Target):
        (group,) = cfg.kv_groups
        self._shape = group.block_shape(target.block_size)
        self._dtype, self._device, self.block_size = target.dtype, target.device, target.block_size
        self.block_bytes = torch.Size(self._shape).numel() * target.dtype.itemsize
        self.kv = torch.empty(0)
        self._num_blocks: dict[int, int] = {}  # by slot
        self._hidden_size = cfg.hidden_size
        self._graphs: DraftGraphs | None = None

    def allocate(self, num_blocks: int) -> None:
        self.kv = torch.zeros((num_blocks + 1, *self._shape), dtype=self._dtype, device=self._device)

    def follow(self, plan: StepPlan) -> None:
        """Apply the block table changes of a plan."""
        for new in plan.added:
            self._num_blocks[new.slot] = 0
        for change in plan.blocks:
            if change.group:
                continue
            last = change.index + len(change.blocks)
            self._num_blocks[change.slot] = max(last, self._num_blocks.get(change.slot, 0))
            for block, start in change.cleared:
                self.kv[block, :, :, :, start:] = 0

    def capacity(self, step: DraftInputs, entry: int) -> int:
        """Return the number of tokens for which an entry of the plan has blocks."""
        blocks = self._num_blocks.get(step.plan.slots[entry], 0)
        return min(blocks, step.tables.shape[1]) * self.block_size

    def own(self, batch: Batch) -> Batch:
        """Return the target's batch with this cache instead of the target's, and without the state that was prepared
        for the target's heads."""
        own = replace(batch, kv_cache=self.kv, kv_scales=None, other_groups=(), views={})
        return replace(own, tiles=None, latent_tiles=None, plans={})

    def capture(
        self, device: Device, forward: Forward, sizes: Sequence[int], max_blocks: int, num_drafts: int, budget: int
    ) -> None:
        """Capture `continue_drafts` for these numbers of sequences. max_blocks: most blocks of a sequence. num_drafts:
        most drafts of a sequence. budget: bytes for all graphs."""
        rows = DraftRows.allocate(max(sizes), self._hidden_size, max_blocks, num_drafts, self._dtype, self._device)
        self._graphs = DraftGraphs(rows)

        def run(rows: DraftRows) -> Tensor:
            ids, hidden, positions, draft = self._pass(
                rows.ids, rows.hidden, rows.positions, rows.capacity, rows.tables, forward
            )
            rows.drafts.copy_(torch.cat((rows.drafts[:, 1:], draft[:, None]), dim=1))
            rows.ids.copy_(ids)
            rows.hidden.copy_(hidden)
            rows.positions.copy_(positions)
            return hidden

        self._graphs.capture(device, sizes, run, budget)

    def continue_drafts(
        self, step: DraftInputs, entries: list[int], ids: Tensor, hidden: Tensor, positions: Tensor, forward: Forward
    ) -> Tensor:
        """Return [n, plan.num_drafts] token ids: `ids`, the first draft of each entry, and the drafts that follow; -1
        where an entry has no block for the KV of the previous draft.

        hidden: [n, hidden], for the first call of `forward`. forward: the function given to `capture`. positions: of
        each entry's last token whose KV is in the cache.
        """
        passes = step.plan.num_drafts - 1
        rows = copy_to(entries, ids.device)
        tables = step.tables.index_select(0, rows)
        capacity = copy_to([self.capacity(step, entry) for entry in entries], ids.device)
        if self._graphs is not None and passes:
            further = self._graphs.run(passes, ids, hidden, positions, capacity, tables)
            if further is not None:
                return torch.cat((ids[:, None], further), dim=1)
        drafts = [ids]
        for _ in range(passes):
            ids, hidden, positions, draft = self._pass(ids, hidden, positions, capacity, tables, forward)
            drafts.append(draft)
        return torch.stack(drafts, dim=1)

    def _pass(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, capacity: Tensor, tables: Tensor, forward: Forward
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the new ids, hidden states and positions, and the drafts: the ids, or -1 where there was no room."""
        positions = positions + 1
        fits = positions < capacity
        ids, hidden = forward(ids, hidden, self._single_rows(tables, positions, fits))
        return ids, hidden, positions, torch.where(fits, ids, -1)

    def _single_rows(self, tables: Tensor, positions: Tensor, fits: Tensor) -> Batch:
        """Return a batch with one token per sequence. A token that does not fit is written to the extra block at the
        end of the cache, and attends only to the first token of its sequence."""
        count = len(positions)
        positions = torch.where(fits, positions, 0)
        blocks = tables.gather(1, (positions // self.block_size)[:, None]).squeeze(1).long()
        blocks = torch.where(fits, blocks, len(self.kv) - 1)
        start = torch.arange(count + 1, dtype=torch.int32, device=positions.device)
        return Batch(
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start=start,
            kv_len=(positions + 1).int(),
            block_table=tables,
            kv_cache=self.kv,
            single=start[:count],
            chunks=[],
        )


class CachedDrafter(ModelDrafter):
    """A drafter with a KV cache."""

    def __init__(self, cfg: ModelConfig, target: Target):
        """cfg: configuration of the drafter's layers."""
        self._cache = DraftCache(cfg, target)
        self.block_bytes = self._cache.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self._cache.allocate(num_blocks)

    def capture(self, device: Device, sizes: Sequence[int], max_blocks: int, num_drafts: int, budget: int) -> None:
        self._cache.capture(device, self._forward, sizes, max_blocks, num_drafts, budget)

    def follow(self, plan: StepPlan) -> None:
        self._cache.follow(plan)

    def _forward(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute a pass; see `Forward`."""
        raise NotImplementedError
