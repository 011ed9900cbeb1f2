"""The first stage writes tokens that the last one has sampled, and the host does not wait for its GPU."""

from __future__ import annotations

import torch

from engine.parts.stages.rank.pipeline_stage import UnknownTokens
from tests.sync_guard import guarded


def test_tokens_of_another_stage_are_written_without_a_wait_for_the_device():
    history = torch.zeros(12, dtype=torch.int32)
    unknown = UnknownTokens([4, 5, 6], [0, 0, 1, 2], torch.tensor([1, 2, 5, 9]), replaced={6})
    guarded(unknown.write)([[7], [-1], [8]], history)  # of two verified drafts one was accepted; -1 ends a request
    assert history.tolist() == [0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_no_token_is_written_for_a_step_that_has_sampled_none():
    history = torch.zeros(3, dtype=torch.int32)
    guarded(UnknownTokens([0], [], torch.empty(0, dtype=torch.int64)).write)([[]], history)
    assert not history.any()
