"""`make bench-gpu` as far as it goes without a GPU: every part runs once, tiny and on a late device; parts that hang or
fail leave the others alone; steps of real sizes are counted."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks import quantized_linear
from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import card, engines, expected, first, parts
from benchmarks.gpu.card import CARDS, Card
from benchmarks.gpu.engines import SHAPES, shape_config
from benchmarks.gpu.first import FIRST
from benchmarks.gpu.meta_steps import META, Launches, MetaModel
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.memory_floor import weight_bytes
from engine.model.ops import attention, dispatch
from engine.model.ops.gpu import attention as triton_attention
from engine.model.ops.gpu import norm
from engine.model.ops.gpu.libraries import attention as library_attention
from engine.model.ops.gpu.libraries import choice
from engine.offline.weightless_model import as_on_a_gpu
from engine.runner.graphs import cuda_graphs
from tests.late_device import LateDevice

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1200,
    "max_position_embeddings": 2048, "draft_vocab_size": 600,
    "eagle_aux_hidden_state_layer_ids": [0, 1],
}  # fmt: skip
SMALL = {
    "CONTEXT": 8, "WARM_STEPS": 1, "STEPS": 2, "PROMPT": 1024, "LONG": 100, "MODEL_LEN": 1100, "PROFILED_STEPS": 2,
    "STREAMS": 4, "ARRIVALS": 2, "ARRIVING_PROMPT": 8, "CONTEXTS": (64,), "ATTENTION_SEQS": 2, "NANO_SEQS": 3,
    "NANO_LENGTHS": (2, 6), "LINEAR_ROWS": (2,), "DEVICE": "cpu", "IMAGE_EMBEDS": 4, "IMAGES": 2,
}  # fmt: skip
TINY_IMAGES = {
    "image_token_id": 700, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {
        **SHAPES["Qwen2.5-VL 7B"]["vision_config"], "depth": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [1],
    },
}  # fmt: skip
MEASURED = [part for part in dict.fromkeys((*PARTS, *FIRST)) if part.measure not in (None, first.tried, first.compiled)]


class FakeEvent:
    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


@pytest.fixture
def rehearsal(monkeypatch) -> None:
    importlib.import_module("engine.model.transformers_backend.vision")  # looks at torch.cuda as it is imported
    for name, value in SMALL.items():
        monkeypatch.setattr(parts, name, value)
    monkeypatch.setattr(card, "COPY_BYTES", 1024)
    for module in (card, parts):
        monkeypatch.setattr(module, "MATRIX", 16)
    for name, shape in SHAPES.items():
        tiny = {key: value for key, value in {**TINY, **TINY_IMAGES}.items() if key in shape}
        monkeypatch.setitem(engines.SHAPES, name, {**shape, **tiny})
    monkeypatch.setitem(quantized_linear.SHAPES, "8B", (128, 384, 128, 256))
    for name in ("MAX_DECODE_SIZE", "MAX_MIXED_SIZE"):  # few graphs
        monkeypatch.setattr(cuda_graphs, name, 8)
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    monkeypatch.setattr("engine.runner.rank_setup.open_device", lambda name: LateDevice())
    monkeypatch.setattr("engine.runner.graphs.torch_compile.compile_layers", lambda *args: None)
    monkeypatch.setattr(choice, "CudaDevice", LateDevice)
    monkeypatch.setattr(choice, "TIMED", ((64,), (16,) * 4))
    monkeypatch.setattr(library_attention, "OP", library_attention.OP._replace(ours=library_attention.OP.plain))
    monkeypatch.setattr(library_attention.attention, "paged_attention", attention.paged_attention)
    monkeypatch.setattr(first, "BATCHES", (1, 3))
    monkeypatch.setattr("engine.assembly.open_runner.check_kernels", lambda *args: None)
    build = engines.EngineConfig
    monkeypatch.setattr(
        engines, "EngineConfig", lambda **options: build(**options, num_gpu_blocks_override=2000, num_threads=1)
    )
    for name, stand_in in {
        "Event": FakeEvent, "synchronize": lambda: None,
        "graph": lambda graph: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "get_device_name": lambda: "a card",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)


#: Parts that call the same function as one before them, with other numbers.
LIKE_OTHERS = (
    "decode 8B, batch 64", "profile 8B, batch 64", "top_k", "fp8", "30B-A3B, batch 64", "without graphs",
    "8192 tokens, torch.compile", "our attention", "batch 1, drafts", "batch 64, drafts by EAGLE-3",
    "none in the batch", "Lite, batch 64", "0.6B, batch 256", "gpt-oss 20B, batch 64", "top_p", "30B-A3B, batch 1",
    "100k among 63 of 1k", "batch 64, torch.compile",
)  # fmt: skip


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[pytest.mark.slow] if part.name.endswith(LIKE_OTHERS) else [], id=part.name)
        for part in MEASURED
    ],
)
def test_a_part_runs_from_its_first_line_to_its_last(part, rehearsal):
    found = part.measure(Card(1e12, 1e14))
    numbers = dict(item for each in ([found] if isinstance(found, dict) else found) for item in each.items())
    assert numbers and all(isinstance(value, int | float) for value in numbers.values())


@pytest.mark.slow
def test_parts_that_hang_or_fail_are_rows_of_the_table_and_the_others_go_on(tmp_path, monkeypatch, capfd):
    test = tmp_path / "test_it.py"
    test.write_text("def test_right(): ...\ndef test_wrong(): assert 0\n")
    monkeypatch.setattr(bench, "gpus", lambda: 1)
    monkeypatch.setattr(bench, "PARTS", (
        Part("hangs", 1, command=("-c", "import time; time.sleep(60)")),
        Part("tests", 60, command=parts.pytest(1, str(test), "-p", "no:cacheprovider")),
        Part("breaks", 60, command=("-c", "import os; os.abort()")),
        Part("needs two", 60, gpus=2),
        Part(bench.SANITIZER, 60),
    ))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--out", str(tmp_path / "out")])
    assert bench.main() == 1
    rows = {row.name: row for row in bench.saved(tmp_path / "out")}
    assert rows["hangs"].problem == "took more than 1 s"
    assert rows["tests"].numbers == {"passed": 1, "failed": 1, "skipped": 0}
    assert rows["tests"].failed[0].endswith("test_it.py::test_wrong")
    assert rows["breaks"].problem == "exit status -6"
    assert "needs two" not in rows
    assert capfd.readouterr().out.rstrip().endswith("|"), "the table comes last"

    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--out", str(tmp_path / "out"), "--resume", "--limit", "0"])
    monkeypatch.setattr(bench, "PARTS", (*bench.PARTS, Part("late", 60, command=("-c", ""))))
    bench.main()
    assert [row.problem for row in bench.saved(tmp_path / "out")][-1] == "left out: the 0 s are over"


@pytest.mark.parametrize("file", ["part.json", "part.xml"])
def test_a_part_that_is_ended_while_it_writes_its_results_is_a_row_with_a_problem(tmp_path, file):
    write = f"import os, pathlib; pathlib.Path({str(tmp_path / file)!r}).write_text('<'); os.abort()"
    assert bench.run_part(Part("torn", 60, command=("-c", write)), 60, tmp_path, []).problem == "exit status -6"


def test_a_measured_part_finds_the_rates_of_the_card_and_leaves_its_numbers(tmp_path, monkeypatch):
    rows = [bench.Row("copy", numbers={"GB/s": 4300.0}), bench.Row("matrix product, bf16", numbers={"TFLOP/s": 790.0})]
    bench.save(tmp_path, rows, "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert bench.measure(Part("some", 1, lambda found: {"GB/s": found.bytes_per_s / 1e9}), tmp_path) == 0
    assert json.loads((tmp_path / "part.json").read_text()) == {
        "numbers": {"GB/s": 4300.0}, "problem": None, "device": "a card",
    }  # fmt: skip
    assert bench.measure(Part("wrong", 1, lambda found: {}[0]), tmp_path) == 1
    assert "KeyError" in json.loads((tmp_path / "part.json").read_text())["problem"]
    assert bench.expected(bench.Row("decode 8B, batch 1"), bench.card_of(rows)) == "4.7 ms"


def test_a_part_that_is_ended_leaves_the_numbers_that_it_had(tmp_path, monkeypatch):
    def some(card):
        yield {"GB/s": 1.0}
        yield {"GB/s, once more": 2.0}
        raise SystemExit

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    with pytest.raises(SystemExit):
        bench.measure(Part("some", 1, some), tmp_path)
    assert json.loads((tmp_path / "part.json").read_text())["numbers"] == {"GB/s": 1.0, "GB/s, once more": 2.0}


def test_parts_are_chosen_by_their_whole_names(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--first", "--only", "8B"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--only: 8B: not among requirements; kernels compiled; " in capsys.readouterr().err


LAYER = {"rms_norm_kernel": 2, "rotate_and_write_kernel": 1, "attend_kernel": 1, "gated_kernel": 1, "linear": 4}
"""Norm; q, k and v; rotation, norms of heads and KV; attention; o; norm; gate and up; activation; down."""


@pytest.fixture
def counters() -> None:
    """Make what the first step of a process makes for all others, whichever test has that step."""
    with as_on_a_gpu((9, 0)):
        triton_attention.counters(META)


QUANTIZED = {
    "linear": 0, "rms_norm_kernel": 0, "gated_kernel": 0, "norm_quantize_kernel": 2, "gated_quantize_kernel": 1,
    "quantize_kernel": 1,
}  # fmt: skip
"""Both norms and the activation quantize for the next product; what attention returns is quantized on its own."""


@pytest.mark.parametrize(
    ("shape", "options", "of_layer"),
    [
        ("8B", {}, LAYER),
        ("0.6B", {}, LAYER),
        ("8B", {"quantization": "fp8"}, {**LAYER, **QUANTIZED, "_scaled_mm": 4}),
        ("8B", {"quantization": "int8"}, {
            **LAYER, **QUANTIZED, "_int_mm": 4, "mul": 8, "to": 8,
        }),
        ("8B", {"quantization": "int4"}, LAYER),
        ("30B-A3B", {}, {
            **LAYER, "linear": 3, "top_k_softmax_kernel": 1, "order_kernel": 1, "index": 1, "_grouped_mm": 2,
            "combine_kernel": 1,
        }),
        pytest.param("30B-A3B", {"quantization": "fp8"}, {
            **LAYER, **QUANTIZED, "linear": 1, "rms_norm_kernel": 1, "norm_quantize_kernel": 1, "quantize_kernel": 2,
            "_scaled_mm": 2, "grouped_kernel": 2, "top_k_softmax_kernel": 1, "order_kernel": 1, "combine_kernel": 1,
        }, marks=pytest.mark.slow),
        ("70B", {"ranks": 8}, {**LAYER, "all_reduce": 2}),
        ("70B", {"ranks": 8, "quantization": "fp8"}, {
            **LAYER, **QUANTIZED, "_scaled_mm": 4, "all_reduce": 2,
        }),
    ],
)  # fmt: skip
def test_a_decode_step_of_real_size_launches_no_more_than_it_did(shape, options, of_layer, counters):
    quantization, ranks = options.get("quantization"), options.get("ranks", 1)
    config = shape_config(shape, quantization, num_hidden_layers=8)
    launches = MetaModel(config, ranks).launches(64, 64, config.max_position_embeddings)
    scales = 2 if quantization in ("int8", "int4") else 0  # of the head, which then has eight bits
    for name, count in of_layer.items():
        # the last norm, the head, and the embedding's all-reduce
        assert 0 <= launches[name] - count * config.num_layers <= 1 + scales, launches
    rest = launches.total() - sum(of_layer.values()) * config.num_layers
    assert rest <= (11 if ranks == 1 else 25) + scales, launches


@pytest.mark.parametrize(("shape", "most"), [("Qwen3-Next 80B-A3B", 22), ("DeepSeek V2 Lite", 22), ("gpt-oss 20B", 14)])
def test_recurrent_and_latent_layers_and_quantized_experts_launch_no_more_than_they_did(shape, most):
    """None of them reads lengths on the host, which tensors without values would not let it."""
    changes = {"layer_types": ["sliding_attention", "full_attention"] * 2} if shape == "gpt-oss 20B" else {}
    config = shape_config(shape, num_hidden_layers=4, **changes)
    model = MetaModel(config)
    assert model.launches(1024, 64, 4096)
    assert model.launches(64, 64, 4096).total() <= most * config.num_layers + 14


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("shape", "quantization", "ranks"),
    [
        ("8B", None, 1), ("8B", "int8", 1), ("70B", None, 8), ("70B", "fp8", 8), ("30B-A3B", None, 1),
        ("30B-A3B", None, 4),
    ],
)  # fmt: skip
def test_steps_of_real_sizes_fit_into_every_kernel_and_library_call(shape, quantization, ranks, capability):
    config = shape_config(shape, quantization, num_hidden_layers=2)
    model = MetaModel(config, ranks, capability)
    for tokens, seqs in ((1, 1), (64, 64), (1024, 64), (8192, 4)):
        assert model.launches(tokens, seqs, config.max_position_embeddings)


def test_a_launch_that_does_not_fit_is_refused():
    x, host, huge = torch.empty(4, 16, device=META), torch.ones(16), torch.empty(2**20, 4096, device=META)
    with Launches() as launches:
        norm.rms_norm(x, x[0], 1e-6, 0.0)
        with pytest.raises(ValueError, match="on cpu"):
            norm.rms_norm(x, host, 1e-6, 0.0)
        with pytest.raises(ValueError, match="offsets of 32 bits"):
            norm.rms_norm(huge, huge[0], 1e-6, 0.0)
        with pytest.raises(ValueError, match="a grid of"):
            norm.rms_norm_kernel[(1, 70_000)](*[x] * 5, 4, 16, 16, 1e-6, 0.0, *[1] * 6)
        with pytest.raises(TypeError, match="missing a required argument"):
            norm.rms_norm_kernel[(1,)](x)
    assert launches.names == ["rms_norm_kernel"]


@pytest.mark.parametrize("shape", ["8B", "0.6B", "30B-A3B"])
def test_a_decode_step_has_to_read_what_the_matrices_of_the_model_take(shape):
    config = shape_config(shape)
    for tokens in (1, 64):
        read = weight_bytes(config, torch.bfloat16, batch_size=tokens)
        assert MetaModel(config).weight_bytes(tokens) == pytest.approx(read, rel=1e-3)


def test_the_expected_times_lie_between_the_floor_and_twice_it_where_memory_counts():
    for name in ("decode 8B, batch 1", "decode 8B, batch 64", "prefill 8B, 8192 tokens"):
        case = expected.CASES[name]
        counts = expected.count(case)
        for rates in CARDS.values():
            assert 1 < counts.expected_s(rates, case) / counts.floor_s(rates, case) < 2
