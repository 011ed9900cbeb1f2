from __future__ import annotations

import pytest
import torch

from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.model.loader import load_weights
from engine.model.models.registry import build_model
from tests.batches import ByHand
from tests.models import FAMILIES, make_model
from tests.ranks import make_ranks, on_all


@pytest.mark.parametrize("size", [2, 4])  # 2 KV heads: with four ranks each is held twice
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_has_the_logits_of_the_unsharded_model(tmp_path, family, size):
    folder = make_model(tmp_path, family)
    cfg = ModelConfig.from_folder(folder)

    def load(tp: TPGroup) -> ByHand:
        model = build_model(cfg, tp, torch.float32, "cpu")
        load_weights(model, folder, tp)
        return ByHand(model, cfg, tp=tp)

    steps = [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}]
    whole = load(TPGroup.single())
    expected = [whole.step(tokens) for tokens in steps]
    ranks = make_ranks(size)
    parts = [load(tp) for tp in ranks]
    for logits in on_all(ranks, lambda rank: [parts[rank].step(tokens) for tokens in steps]):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
