"""How a model is divided over ranks: known cases, and the formulas of bytes per token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.planning.layouts import GIB, Link, Machines, ModelSizes, ParallelLayout, Workload, plan, why

NVLINK, INFINIBAND, GIGABIT = Link(450e9, 5e-6), Link(50e9, 10e-6), Link(0.125e9, 100e-6)
H100 = Machines(nodes=1, devices=8, flops=989e12, bandwidth=3.35e12, memory=80e9, inside=NVLINK, between=INFINIBAND)
SLOW = replace(H100, nodes=2, devices=1, between=GIGABIT)
LLAMA_8B = ModelSizes(
    layers=32, hidden=4096, heads=32, kv_heads=8, item_bytes=2, dense_bytes=16e9, active=8e9, kv_bytes=131_072
)
LLAMA_70B = ModelSizes(
    layers=80, hidden=8192, heads=64, kv_heads=8, item_bytes=2, dense_bytes=141e9, active=70.6e9, kv_bytes=327_680
)
QWEN_30B = ModelSizes(  # 128 experts of 768
    layers=48, hidden=2048, heads=32, kv_heads=4, item_bytes=2, dense_bytes=3e9, expert_bytes=58e9, num_experts=128,
    experts_per_token=8, expert_size=768, expert_layers=48, active=3.3e9, kv_bytes=98_304,
)  # fmt: skip
DEEPSEEK = ModelSizes(  # V3 in float8
    layers=61, hidden=7168, heads=128, kv_heads=1, item_bytes=2, dense_bytes=17e9, expert_bytes=654e9, num_experts=256,
    experts_per_token=8, expert_size=2048, expert_layers=58, active=37e9, kv_bytes=70_272,
)  # fmt: skip


LOAD = Workload()


def best(model: ModelSizes, machines: Machines, load: Workload = LOAD) -> ParallelLayout:
    return plan(model, machines, load)[0]


def sizes(layout: ParallelLayout) -> tuple[int, int, bool, int]:
    return layout.tensor, layout.pipeline, layout.expert, layout.data


def find(model: ModelSizes, machines: Machines, *wanted: object) -> ParallelLayout:
    return next(layout for layout in plan(model, machines, LOAD) if sizes(layout) == wanted)


def test_a_small_dense_model_gets_a_replica_on_each_device():
    layout = best(LLAMA_8B, H100, Workload(context=512))
    assert sizes(layout) == (1, 1, False, 1)
    assert layout.replicas == 8


def test_a_large_dense_model_on_one_node_is_split_over_tensor_ranks():
    layout = best(LLAMA_70B, H100)
    assert layout.tensor > 1 and layout.pipeline == layout.data == 1
    assert "on 2 ranks weights and KV do not fit" in why(layout, plan(LLAMA_70B, H100, LOAD), LOAD)


def test_two_nodes_on_an_ordinary_network_get_stages():
    medium = replace(LLAMA_70B, dense_bytes=100e9, active=50e9)  # too large for one device
    found = plan(medium, SLOW, LOAD)
    assert sizes(found[0]) == (1, 2, False, 1)
    tensor = find(medium, SLOW, 2, 1, False, 1)
    assert tensor.itl_s > found[0].itl_s and not tensor.tensor_inside
    reason = why(found[0], found, LOAD)
    assert "on 1 rank weights and KV do not fit" in reason
    assert "the sums of tensor_parallel_size 2 would send 2560 KiB per token between nodes" in reason


def test_narrow_experts_are_not_cut():
    alone = [layout for layout in plan(QWEN_30B, H100, LOAD) if layout.data == 1]
    assert all(layout.expert == (layout.tensor == 8) for layout in alone)  # 768 / 8 < 128
    small, narrow = replace(H100, memory=40e9), replace(QWEN_30B, expert_size=192)  # two cards are needed
    found = [layout for layout in plan(narrow, small, LOAD) if layout.data == 1]
    assert found[0].tensor > 1 and found[0].expert
    assert "slices of its experts would be too narrow" in why(found[0], found, LOAD)


def test_experts_with_latent_attention_get_groups_with_their_own_kv():
    nodes = replace(H100, nodes=2, memory=141e9)
    layout = best(DEEPSEEK, nodes)
    assert layout.data > 1 and layout.expert
    assert layout.kv_tokens > 2 * find(DEEPSEEK, nodes, 16, 1, False, 1).kv_tokens


def test_there_is_room_for_the_longest_sequence_too():
    load = Workload(context=1000, longest=600_000)
    assert all(layout.kv_tokens > load.longest for layout in plan(LLAMA_8B, H100, load) if layout.sequences)
    assert best(LLAMA_8B, H100, load).ranks > best(LLAMA_8B, H100, Workload(context=1000)).ranks == 1


def test_nothing_fits_and_why():
    layout = best(DEEPSEEK, H100)
    assert layout.sequences == 0 and "does not fit" in str(layout)
    assert why(layout, [layout], LOAD) == "no layout fits: 78 GiB of weights per rank is the least"


def test_if_no_layout_keeps_the_limit_the_fastest_is_chosen():
    load = Workload(itl_s=0.001)
    found = plan(LLAMA_70B, H100, load)
    fitting = [layout for layout in found if layout.sequences]
    assert found[0].itl_s == min(layout.itl_s for layout in fitting)
    assert "no layout keeps 1 ms between tokens" in why(found[0], found, load)


@pytest.mark.parametrize(("tensor", "kib"), [(2, 512), (8, 896)])
def test_tensor_ranks_send_two_ring_sums_per_layer(tensor, kib):
    assert find(LLAMA_8B, H100, tensor, 1, False, 1).tensor_bytes == kib * 1024


def test_a_stage_sends_one_row_and_groups_send_a_row_to_each_other_group_and_back():
    assert find(LLAMA_8B, H100, 1, 4, False, 1).stage_bytes == 2 * 4096
    grouped = find(DEEPSEEK, H100, 1, 1, True, 8)
    assert (grouped.tensor_bytes, grouped.expert_bytes) == (0, 2 * 7 * 7168 * 2 * 58)
    both = find(DEEPSEEK, H100, 2, 1, True, 4)  # a rank sends half of its engine's rows to the seven others
    assert (both.tensor_bytes, both.expert_bytes) == (2 * 7168 * 2 * 61, 2 * 7 / 2 * 7168 * 2 * 58)
    assert "KiB per token for sums inside a node" in str(both) and "for experts inside a node" in str(both)


def test_all_to_all_sends_a_row_to_each_rank_that_has_an_expert_of_the_token_and_back():
    ranks, none = 16, 1.0
    for i in range(8):
        none *= (256 - 256 / ranks - i) / (256 - i)
    nodes = replace(H100, nodes=2)
    found = plan(DEEPSEEK, nodes, replace(LOAD, all2all_backend="alltoall"))
    layout = next(layout for layout in found if sizes(layout) == (1, 1, True, ranks))
    assert layout.expert_bytes == pytest.approx(2 * (ranks - 1) * (1 - none) * 7168 * 2 * 58)
    assert layout.expert_bytes < 0.45 * find(DEEPSEEK, nodes, 1, 1, True, ranks).expert_bytes
    assert "for experts between nodes by alltoall;" in str(layout)
    gathered = find(DEEPSEEK, nodes, 1, 1, True, ranks)
    assert f"by allgather_reducescatter ({layout.expert_bytes / 1024:.0f} by alltoall)" in str(gathered)


def test_engines_of_several_ranks_are_on_one_node_each_and_the_experts_on_all():
    large = replace(DEEPSEEK, dense_bytes=100e9, active=80e9)  # too large for a card
    nodes = replace(H100, nodes=2, memory=141e9)
    found = plan(large, nodes, LOAD)
    layout = found[0]
    assert layout.tensor > 1 and layout.data > 1 and layout.expert
    assert layout.tensor_inside and not layout.expert_inside
    reason = why(layout, found, LOAD)
    assert "on 8 ranks weights" not in reason, "tensor_parallel_size 8 fits"
    assert "the ranks of an engine are on one node, and only rows of experts pass between nodes" in reason


def test_a_rank_has_its_part_of_dense_layers_and_of_experts():
    layout = find(DEEPSEEK, H100, 2, 2, False, 1)
    assert layout.weight_bytes == (17e9 / 2 + 654e9 / 2) / 2
    assert find(DEEPSEEK, H100, 1, 1, True, 8).weight_bytes == 17e9 + 654e9 / 8
    assert f"{layout.weight_bytes / GIB:.1f} GiB of weights per rank" in str(layout)


@given(
    st.sampled_from([LLAMA_8B, LLAMA_70B, QWEN_30B, DEEPSEEK]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([GIGABIT, INFINIBAND]),
    st.sampled_from([0.005, 0.05, 1.0]),
)
def test_layouts_fit_the_devices_and_come_in_order(model, nodes, devices, between, itl_s):
    load, machines = Workload(itl_s=itl_s), replace(H100, nodes=nodes, devices=devices, between=between)
    found = plan(model, machines, load)
    assert found and len(set(map(sizes, found))) == len(found)
    for layout in found:
        assert layout.ranks * layout.replicas <= nodes * devices
        assert layout.sequences * load.context <= max(0, layout.kv_tokens)
    good = [layout.tokens_per_s for layout in found if layout.sequences and layout.itl_s <= itl_s]
    assert good == sorted(good, reverse=True)
    assert all(layout.sequences and layout.itl_s <= itl_s for layout in found[: len(good)])
