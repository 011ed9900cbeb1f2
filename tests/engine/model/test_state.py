"""States of recurrent layers that a step has changed are put back, so that it can be computed again."""

from __future__ import annotations

import torch

from engine.model.state import StateCache, StateSpec
from engine.wire.parts.states import StateRestore, StateSave, StateStep
from engine.wire.plan import StepPlan


def test_a_step_is_undone_even_if_it_saves_into_the_snapshot_that_it_has_restored():
    spec = StateSpec({"state": ((4,), "float32")}, {"rows": ((2,), "float32")})
    cache = StateCache([spec, spec], slots=3, num_snapshots=2, device=torch.device("cpu"))
    tensors = [tensor for layer in cache.layers for tensor in layer.values()]
    for tensor in tensors:
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    restored, saved = [StateRestore(1, 0)], [StateSave(1, 32, 0)]
    plan = StepPlan(
        0, [], [], slots=[1], starts=[0], counts=[1], samples=[True], parts={"states": StateStep(restored, saved)}
    )
    kept = cache.keep(plan)
    cache.restore(plan)
    for tensor in tensors:
        tensor[1] = 99.0  # the step, until it was interrupted
    for layer in cache.layers:
        layer["state"][cache.slots] = 99.0
    cache.put_back(kept)
    assert all(map(torch.equal, tensors, before))
