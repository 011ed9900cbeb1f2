from __future__ import annotations

import torch

from engine.model.batch import Batch
from engine.spec_decode.draft_cache import DraftCache
from tests.engine.spec_decode.draft_steps import NUM_BLOCKS, load_target
from tests.models import make_model


def test_what_attention_derived_for_the_heads_of_the_target_is_not_the_drafters(tmp_path):
    target = load_target(make_model(tmp_path, "qwen3"))
    cache = DraftCache(target.config, target)
    cache.allocate(NUM_BLOCKS)
    none = torch.zeros(1, dtype=torch.int64)
    batch = Batch(none, none, none.int(), none.int(), none[None].int(), none, none.int(), [])
    batch.plans["decode"] = none
    own = cache.own(batch)
    own.plans["window"] = none
    assert set(own.plans) == {"window"} and set(batch.plans) == {"decode"}
    assert own.kv_cache is cache.kv and own.block_table is batch.block_table
