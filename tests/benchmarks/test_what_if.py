from __future__ import annotations

import pytest

from benchmarks.what_if import CHANGES, load, section_of
from cluster.config.app_config import AppConfig


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_a_configuration_that_differs_as_it_says(name):
    config = AppConfig.parse({"models": [section_of(CHANGES[name])]})
    (model,) = config.models
    engine, changes = model.engine_config(), CHANGES[name]
    assert engine.max_num_seqs == changes.get("max_num_seqs", 64)
    assert engine.max_num_batched_tokens == changes.get("max_num_batched_tokens", 512)
    assert model.decode.num_replicas == changes.get("decode.num_replicas", 2)
    assert (model.prefill is None) == ("prefill.num_replicas" not in changes)
    assert model.decode.routing_config().policy == changes.get("routing.policy", "prefix_aware")


@pytest.mark.parametrize("name", ["chats", "long prompts", "long answers"])
def test_requests_of_a_load_fit_into_the_model(name):
    assert load(name).longest < 2048
