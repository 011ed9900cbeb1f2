from __future__ import annotations

import pytest

from placement.cuda_device import device_index, rank_options
from placement.spec import GroupSpec


@pytest.mark.parametrize(
    ("own", "visible", "index"),
    [
        ("3", None, 3),
        ("3", "0,1,2,3", 3),
        ("6", "4, 6", 1),  # a node whose Ray was started with two of its cards
        ("GPU-8f2a", "GPU-11c0,GPU-8f2a", 1),
        ("MIG-7", "MIG-7", 0),
    ],
)
def test_a_rank_finds_its_own_card_among_those_of_its_node(own, visible, index):
    assert device_index(own, visible) == index


def test_a_card_that_is_masked_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="GPU '3', which CUDA_VISIBLE_DEVICES=0,1 does not name"):
        device_index("3", "0,1")


def test_ranks_with_a_gpu_see_those_of_the_others_so_that_each_has_an_index_of_its_own():
    options = rank_options(GroupSpec(num_gpus=1))
    assert options["num_gpus"] == 1
    assert options["runtime_env"]["env_vars"] == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert "runtime_env" not in rank_options(GroupSpec()), "a process that Ray has ready would not do"
