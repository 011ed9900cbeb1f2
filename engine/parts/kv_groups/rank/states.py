"""The states of recurrent layers on a rank."""

from __future__ import annotations

from engine.devices.device import StagedCopy
from engine.devices.free_memory import FreeMemory
from engine.model.state import StateBatch, StateCache
from engine.parts.kv_groups.rank.snapshot_memory import choose_num_snapshots, snapshot_bytes, specs_of
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward, StepMemory
from engine.runner.step_layout import StepLayout
from engine.wire.parts.states import NO_STATES, StateStep
from engine.wire.plan import StepPlan


class States(RankPart):
    """The states of running sequences, and snapshots of them."""

    name = StateStep.part

    def __init__(self, setup: RankSetup):
        self._setup, self._specs = setup, specs_of(setup, setup.model)
        self._num_snapshots = 0

    def reserve(self, free: FreeMemory) -> FreeMemory:
        """Choose how many snapshots there are: as many as the rank with the fewest has memory for. What they take is
        not available to the KV cache."""
        setup, specs, device = self._setup, self._specs, self._setup.torch_device
        config, size, model, dtype, tp = setup.config, setup.block_size, setup.model, setup.kv_dtype, setup.tp
        if device.type == "cuda":  # a CPU's pages are taken only when sequences write to them
            running = snapshot_bytes(specs) + sum(spec.row_bytes for spec in specs)
            free = free.less(config.max_num_seqs * running)
        count = choose_num_snapshots(config, size, model, specs, dtype, device, tp, free)
        self._num_snapshots = min(map(int, tp.all_engines.exchange(str(count))))
        self.state_bytes = self._num_snapshots * snapshot_bytes(specs)
        return free

    def allocate(self, memory: StepMemory) -> None:
        setup = self._setup
        self._cache = StateCache(self._specs, setup.config.max_num_seqs, self._num_snapshots, setup.torch_device)
        memory.of[self.name] = self._cache
        if self._num_snapshots:
            memory.more_blocks.append(self._cache.snapshots)
            memory.more_block_bytes.append(snapshot_bytes(specs_of(setup, setup.whole)))

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> StateBatch | None:
        """Return the states of the step's sequences. They run through tokens that verify drafts."""
        layout.divides_drafts = False
        return self._cache.batch(layout.sequences.slots, staged, plan.record(StateStep) or NO_STATES)

    def before(self, step: Forward) -> None:
        """Restore the states of sequences that resume from snapshots."""
        self._cache.restore(step.inputs.plan)
        if step.batch is not None:
            step.batch.states = step.inputs.of.get(self.name)
