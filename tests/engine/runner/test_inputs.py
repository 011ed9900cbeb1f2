from __future__ import annotations

import numpy as np

from engine.runner.inputs import Sequences


def test_each_token_that_verifies_a_draft_is_a_sequence_that_sees_those_before_it():
    plain = Sequences(np.array([3, 0, 5]), np.array([7, 3, 1]), np.array([7, 20, 9]))
    divided, first = plain.divided(np.array([False, True, False]))
    assert divided.slots.tolist() == [3, 0, 0, 0, 5]
    assert divided.counts.tolist() == [7, 1, 1, 1, 1]
    assert divided.ends.tolist() == [7, 18, 19, 20, 9]
    assert first.tolist() == [0, 1, 4]
