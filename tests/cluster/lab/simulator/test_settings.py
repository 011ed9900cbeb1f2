from __future__ import annotations

import pytest
import yaml

from cluster.lab.simulator.tuning.settings import changes, parse_setting, to_yaml, with_settings
from engine.errors import ConfigError, InvalidParameter
from tests.cluster.lab.simulator.small_cluster import small_cluster


def test_settings_that_need_each_other_change_together():
    spec = with_settings(small_cluster(), {"max_num_seqs": 900, "max_num_batched_tokens": 1000})
    assert (spec.engine.max_num_seqs, spec.engine.max_num_batched_tokens) == (900, 1000)
    assert changes(small_cluster(), spec) == {"max_num_seqs": 900, "max_num_batched_tokens": 1000}
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        with_settings(small_cluster(), {"max_num_seqs": 900})


def test_fewer_blocks_hold_shorter_requests():
    spec = small_cluster(num_blocks=100)
    assert with_settings(spec, {"num_gpu_blocks_override": 10}).max_model_len == 160
    assert with_settings(spec, {"num_gpu_blocks_override": 200}).max_model_len == spec.max_model_len


def test_a_setting_has_the_name_and_the_values_of_serve_config():
    assert parse_setting("engine.max_num_seqs=5") == ("max_num_seqs", 5)
    assert parse_setting("enable_prefix_caching=false") == ("enable_prefix_caching", False)
    for text, limit in (
        ("nothing=1", "decode.num_replicas"),
        ("max_num_seqs=0", "1 or more"),
        ("max_num_seqs", "NAME"),
    ):
        with pytest.raises(InvalidParameter, match=limit):
            parse_setting(text)


@pytest.mark.parametrize(
    ("prefill", "values", "expected"),
    [
        (0, {"max_num_seqs": 16, "enable_prefix_caching": False},
         {"engine": {"max_num_seqs": 16, "enable_prefix_caching": False}}),
        (0, {"decode.num_replicas": 1, "prefill.num_replicas": 1, "handoff.policy": "auto"},
         {"decode": {"num_replicas": 1}, "prefill": {"num_replicas": 1}, "handoff": {"policy": "auto"}}),
        (1, {"prefill.num_replicas": 0}, {"prefill": None}),
        (1, {"routing.policy": "round_robin"},
         {"decode": {"routing": {"policy": "round_robin"}}, "prefill": {"routing": {"policy": "round_robin"}}}),
        (0, {}, None),
    ],
)  # fmt: skip
def test_a_change_is_written_as_keys_of_serve_config(prefill, values, expected):
    before = small_cluster(prefill, router="prefix_aware")
    assert yaml.safe_load(to_yaml(before, with_settings(before, values))) == expected


def test_a_change_tells_what_was_there_before():
    before = small_cluster()
    assert to_yaml(before, with_settings(before, {"max_num_seqs": 16})) == "engine:\n  max_num_seqs: 16  # was 8\n"
