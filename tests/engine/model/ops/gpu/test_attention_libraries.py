"""When libraries attend, and with what arguments. On a GPU `check` does so with the real ones."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.ops import attention as plain_attention
from engine.model.ops.gpu import attention
from engine.model.ops.gpu.libraries import attention as library_attention
from engine.model.ops.gpu.libraries import choice, flash_infer
from tests.engine.model.ops.gpu import fake_libraries
from tests.engine.model.ops.gpu.paged import FLOAT8, Case
from tests.products import each_once

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes compute on a CPU")
CASES = {
    "rows and chunks": Case([(300, 1), (0, 33), (50, 18)], block_size=64),
    "rows": Case([(300, 1), (5, 1)], block_size=64),
    "rows and padding": Case([(300, 1), (0, 0), (5, 1)], block_size=64),
    "a window": Case([(300, 1), (40, 9)], block_size=64, window=7),
    "a window for rows": Case([(300, 1), (40, 1)], block_size=64, window=7),
    "seven heads of a KV head": Case([(300, 1), (40, 9)], heads=14, block_size=16, head_dim=80),
}
FAKES = {
    "flashinfer.decode": fake_libraries.flash_infer,
    "flash_attn.cute": fake_libraries.flash_attn_4,
    "flash_attn_interface": fake_libraries.flash_attn_3,
    "flash_attn": fake_libraries.flash_attn_2,
}
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


class NoHostReads(TorchDispatchMode):
    """Raises where a capture would: when the host asks the device for a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    with NoHostReads():
        out = run()
    return out, lambda: out.copy_(run())


@pytest.fixture
def install(monkeypatch):
    """Pretend that these libraries are installed, on a card of this capability."""

    def pretend(*installed: str, capability: tuple[int, int] = HOPPER) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for name, make in FAKES.items():
            monkeypatch.setitem(sys.modules, name, make() if name in installed else None)

    monkeypatch.setattr(choice, "capture", capture)
    monkeypatch.setattr(flash_infer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(flash_infer, "COUNTER_BYTES", 1024)
    monkeypatch.setattr(choice, "seconds", lambda attend, *_: [1.0 + (attend is library_attention.OP.ours)])
    caches = choice.select, choice.load
    for cached in caches:
        cached.cache_clear()
    yield pretend
    for cached in caches:
        cached.cache_clear()


def chosen(case: Case) -> tuple[bool, bool]:
    """Whether libraries compute decode steps, and others."""
    shape = choice.AttentionShape(case.dtype, case.heads, case.kv_heads, case.block_size, case.head_dim, case.window)
    decode, others = choice.select(library_attention.OP, torch.device("cpu"), shape)
    return decode is not None, others is not None


def check(case: Case) -> None:
    q, k, v, batch = case.inputs()
    plain_attention.write_kv(k, v, batch, 1)
    batch.kv_cache.nan_to_num_()  # only our own kernel does without
    expected = plain_attention.paged_attention(q, batch, 1, 0.1, case.window)
    found = library_attention.paged_attention(q, batch, 1, 0.1, case.window)
    real = [row for row, (_, new) in enumerate(case.sequences) if new] if not batch.chunks else slice(None)
    torch.testing.assert_close(found[real], expected[real], atol=2e-2, rtol=2e-2)


LIBRARIES = {  # card, and whether decode steps and others are computed
    "flashinfer.decode": (HOPPER, (True, False)),
    "flash_attn_interface": (HOPPER, (True, True)),
    "flash_attn.cute": (BLACKWELL, (True, True)),
    "flash_attn": (AMPERE, (True, True)),
}
BLOCKS = {"flash_attn": 256}  # of libraries that take no others


@pytest.mark.parametrize(("case", "library"), each_once(CASES, LIBRARIES))
def test_a_library_is_called_so_that_it_gives_what_plain_gives(install, case, library):
    capability, kinds = LIBRARIES[library]
    install(library, capability=capability)
    case = CASES[case].but(block_size=BLOCKS[library]) if library in BLOCKS else CASES[case]
    assert chosen(case) == kinds
    check(case)


@pytest.mark.parametrize(
    ("installed", "capability", "line"),
    [
        (FAKES, HOPPER, "decode steps by FlashInfer, others by FlashAttention 3"),
        (FAKES, BLACKWELL, "decode steps by FlashInfer, others by FlashAttention 4"),
        (("flashinfer.decode",), HOPPER, "decode steps by FlashInfer, others by Triton"),
        (FAKES, AMPERE, "decode steps by Triton, others by Triton"),  # in blocks of 64 tokens
        ((), HOPPER, "decode steps by Triton, others by Triton"),
    ],
)
def test_a_library_that_is_made_for_the_card_is_taken_and_logged_once(install, caplog, installed, capability, line):
    install(*installed, capability=capability)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            chosen(CASES["rows"])
    assert [record.message for record in caplog.records].count(f"attention: {line}") == 1


@pytest.mark.parametrize("capability", [AMPERE, (8, 6), (8, 9)])
def test_flash_attention_2_is_taken_on_ampere_and_ada_if_blocks_have_256_tokens(install, caplog, capability):
    install(*FAKES, capability=capability)
    with caplog.at_level(logging.INFO):
        assert chosen(CASES["rows"].but(block_size=256)) == (True, True)
        assert chosen(CASES["rows"]) == (False, False)
    lines = [record.message for record in caplog.records if "FlashAttention 2" in record.message]
    assert "attention: decode steps by FlashAttention 2, others by FlashAttention 2" in lines
    assert "block size must be divisible by 256" in lines[-1]


def wrong(query: Tensor, *args: object, **options: object) -> Tensor:
    return torch.zeros_like(query)


def failing(*args: object, **options: object) -> Tensor:
    raise RuntimeError("no kernel image is available")


def waiting(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **options: object) -> Tensor:
    """Wait for the host, as flash-attention's main does since #2711."""
    assert cache_seqlens.max().item() > 0
    return fake_libraries.flash_attn_3().flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, **options
    )


def freezing() -> Callable[..., Tensor]:
    """It keeps the lengths that it sees first, as a graph keeps a number of the host's."""
    seen: dict[int, Tensor] = {}

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **options: object) -> Tensor:
        lengths = seen.setdefault(id(cache_seqlens), cache_seqlens.clone())
        return fake_libraries.flash_attn_3().flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, **options
        )

    return attend


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong, "differed by"),
        (failing, "no kernel image is available"),
        (waiting, "not permitted when stream is capturing"),
        (freezing(), "differed by"),
    ],
    ids=["wrong", "failing", "waiting", "freezing"],
)
def test_a_library_that_is_wrong_or_that_a_graph_cannot_hold_is_left_out_by_one_line(
    install, monkeypatch, caplog, function, reason
):
    install()
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = function
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    with caplog.at_level(logging.INFO):
        assert chosen(CASES["rows"]) == (False, False)
    (line,) = [record.message for record in caplog.records if "FlashAttention 3 is not used" in record.message]
    assert reason in line


@pytest.mark.parametrize(
    ("takes", "name"),
    [
        ({"FlashInfer": (1.0, 1.0, 1.0), "Triton": (1.1, 1.1, 1.1)}, "FlashInfer"),
        # one long sequence among short ones, that FlashInfer does not split: twelve times as long
        ({"FlashInfer": (1.0, 1.0, 12.0), "Triton": (1.2, 1.3, 1.0)}, "Triton"),
        ({"FlashInfer": (1.0, 1.0, 1.4), "Triton": (1.5, 1.0, 1.0)}, "FlashInfer"),
    ],
)
def test_decode_steps_are_computed_by_what_is_never_far_behind(install, monkeypatch, caplog, takes, name):
    install("flashinfer.decode")

    def seconds(attend, shape, device) -> list[float]:
        return list(takes["Triton" if attend is attention.paged_attention else "FlashInfer"])

    monkeypatch.setattr(choice, "seconds", seconds)
    with caplog.at_level(logging.INFO):
        assert chosen(CASES["rows"]) == (name == "FlashInfer", False)
    assert f"attention: decode steps by {name}, others by Triton" in [record.message for record in caplog.records]


@pytest.mark.parametrize("shift", [-1, 1, None], ids=["one too few", "one too many", "ignored"])
@pytest.mark.parametrize("window", [7, 1024])
def test_a_library_whose_window_is_another_is_left_out(install, monkeypatch, window, shift):
    install("flashinfer.decode")
    function = sys.modules["flashinfer.decode"].trtllm_batch_decode_with_kv_cache

    def attend(*args: object, window_left: int, **options: object) -> Tensor:
        return function(*args, window_left=-1 if shift is None else window_left + shift, **options)

    case = Case([(300, 1)], block_size=64, head_dim=16, window=window)
    assert chosen(case) == (True, False)
    choice.select.cache_clear()
    choice.load.cache_clear()
    monkeypatch.setattr(sys.modules["flashinfer.decode"], "trtllm_batch_decode_with_kv_cache", attend)
    assert chosen(case) == (False, False)


def test_each_launch_counts_in_the_same_zeros(install, monkeypatch):
    """trtllm-gen leaves them at zero; without a buffer it launches a kernel that fills a new one."""
    install("flashinfer.decode")
    seen: list[Tensor] = []
    function = sys.modules["flashinfer.decode"].trtllm_batch_decode_with_kv_cache

    def attend(*args: object, multi_ctas_kv_counter_buffer: Tensor, **options: object) -> Tensor:
        seen.append(multi_ctas_kv_counter_buffer)
        return function(*args, **options)

    monkeypatch.setattr(sys.modules["flashinfer.decode"], "trtllm_batch_decode_with_kv_cache", attend)
    check(CASES["rows"])
    assert len(seen) > 4 and {buffer.data_ptr() for buffer in seen if buffer is not None} == {seen[0].data_ptr()}
    assert not seen[0].any()


def test_decode_without_a_window_asks_for_none(install, monkeypatch):
    """A window keeps FlashAttention 2 from packing the heads of a KV head: "none" has to be said as none."""
    install("flashinfer.decode")
    calls: list[dict] = []
    function = sys.modules["flashinfer.decode"].trtllm_batch_decode_with_kv_cache

    def attend(*args: object, **options: object) -> Tensor:
        calls.append(options)
        return function(*args, **options)

    monkeypatch.setattr(sys.modules["flashinfer.decode"], "trtllm_batch_decode_with_kv_cache", attend)
    check(CASES["rows"])
    assert {call["window_left"] for call in calls} == {-1}


def test_rows_that_decode_beside_a_chunk_are_split_over_programs_as_if_alone(install):
    """They are launched apart from the chunk, in tiles of their own, each with all query heads of a KV head."""
    install("flashinfer.decode")
    case = Case([(2100, 1), (0, 33)], heads=2, kv_heads=1, block_size=64)
    q, k, v, batch = case.inputs()
    plain_attention.write_kv(k, v, batch, 1)
    library_attention.paged_attention(q, batch, 1, 0.1)
    decode = [item for item in batch.plans[True, 0, 0].tolist() if item[0] >= 0]
    assert len(decode) > 4 and {(item[0], item[2]) for item in decode} == {(0, 1)}


@pytest.mark.parametrize(
    "case",
    [
        CASES["rows"].but(cache_dtype=FLOAT8),
        CASES["rows"].but(dtype=torch.float32),
        CASES["rows"].but(softcap=1.5),
        CASES["rows"].but(sinks=True),
        CASES["rows"].but(chunk=16),
    ],
    ids=["float8 cache", "float32", "capped scores", "sinks", "chunks"],
)
def test_what_libraries_are_not_asked_for_our_own_kernel_computes(install, case):
    install(*FAKES)
    q, k, v, batch = case.inputs()
    plain_attention.write_kv(k, v, batch, 1)
    expected = attention.paged_attention(q, batch, 1, 0.1, **case.scores())
    assert torch.equal(library_attention.paged_attention(q, batch, 1, 0.1, **case.scores()), expected)
