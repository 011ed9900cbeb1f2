import pytest
import torch

from benchmarks.memory_floor import kv_bytes, measure_bandwidth, weight_bytes
from engine.model.config import ModelConfig
from engine.model.state import CHUNK
from tests.models import COMMON, make_model

HIDDEN, VOCAB, LAYERS, INTERMEDIATE = (
    COMMON[f"{name}"] for name in ("hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size")
)
ATTENTION = HIDDEN * (4 + 2 + 2) * 16 + 4 * 16 * HIDDEN
NORMS = (2 * LAYERS + 1) * HIDDEN
MLP = 3 * HIDDEN * INTERMEDIATE
LLAMA = LAYERS * (ATTENTION + MLP) + NORMS


def config(tmp_path, family: str) -> ModelConfig:
    return ModelConfig.from_folder(make_model(tmp_path, family))


@pytest.mark.parametrize("batch_size", [1, 5])
def test_of_an_embedding_only_the_rows_of_the_batch_are_read(tmp_path, batch_size):
    elements = LLAMA + VOCAB * HIDDEN + batch_size * HIDDEN
    llama = config(tmp_path, "llama")
    assert weight_bytes(llama, torch.float32, batch_size) == pytest.approx(4 * elements)
    assert weight_bytes(llama, torch.bfloat16, batch_size) == pytest.approx(2 * elements)


def test_a_matrix_that_embedding_and_head_share_is_read_once(tmp_path):
    assert weight_bytes(config(tmp_path, "llama_tied"), torch.float32, 1) == 4 * (LLAMA + VOCAB * HIDDEN)


@pytest.mark.parametrize(("batch_size", "experts"), [(1, 2), (2, 6 - 6 * (4 / 6) ** 2), (1000, 6)])
def test_of_the_experts_those_are_read_that_a_batch_picks(tmp_path, batch_size, experts):
    moe = config(tmp_path, "qwen3_moe")
    whole = weight_bytes(moe, torch.float32, 10**9)
    idle = (LAYERS - 1) * (6 - experts) * 3 * HIDDEN * 32
    embedding = max(0, VOCAB - batch_size) * HIDDEN
    assert weight_bytes(moe, torch.float32, batch_size) == pytest.approx(whole - 4 * (idle + embedding))


def test_keys_and_values_of_every_token_are_read(tmp_path):
    per_token = LAYERS * 2 * 2 * 16 * 4
    assert kv_bytes(config(tmp_path, "llama"), torch.float32, [10, 30]) == 40 * per_token
    assert kv_bytes(config(tmp_path, "llama"), torch.bfloat16, [10, 30]) == 20 * per_token


def test_a_sliding_window_ends_what_is_read(tmp_path):
    per_token = 2 * 2 * 16 * 4  # in one layer; two of three have a window of 8
    assert kv_bytes(config(tmp_path, "gemma3"), torch.float32, [5, 30]) == (2 * (5 + 8) + 5 + 30) * per_token


def test_a_recurrent_layer_reads_its_state_however_long_the_sequence_is(tmp_path):
    cfg = config(tmp_path, "qwen3_5")  # one of four layers has attention
    state, conv, rows = 4 * 16 * 32 * 4, 16 * (2 * 2 * 16 + 4 * 32) * 4, CHUNK * (2 * 16 + 4 * 32 + 4) * 4
    for length in (10, 300):
        assert kv_bytes(cfg, torch.float32, [length]) == length * 2 * 2 * 16 * 4 + 3 * (state + conv + rows // 2)


def test_bandwidth_is_one_that_memory_can_have():
    assert 1e8 < measure_bandwidth(torch.device("cpu")) < 1e13
