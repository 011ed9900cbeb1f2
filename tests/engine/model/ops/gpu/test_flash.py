"""When FlashAttention attends, and with what arguments. On a GPU `flash.check` does so with the real one."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

from engine.model.ops import attention_plain
from engine.model.ops.gpu import attention, flash
from tests.engine.model.ops.gpu import fake_flash
from tests.engine.model.ops.gpu.paged import FLOAT8, Case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes compute on a CPU")
CASES = {
    "rows and chunks": Case([(300, 1), (0, 33), (50, 18)], block_size=64),
    "rows": Case([(300, 1), (5, 1)], block_size=64),
    "rows and padding": Case([(300, 1), (0, 0), (5, 1)], block_size=64),
    "a window": Case([(300, 1), (40, 9)], block_size=64, window=7),
    "a window for rows": Case([(300, 1), (40, 1)], block_size=64, window=7),
    "seven heads of a KV head": Case([(300, 1), (40, 9)], heads=14, block_size=16, head_dim=80),
}


@pytest.fixture
def install(monkeypatch):
    """Pretend that the library is installed or not, on a card of this capability."""

    def pretend(installed: bool = True, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_3() if installed else None)

    flash.select.cache_clear()
    yield pretend
    flash.select.cache_clear()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_library_is_called_so_that_it_gives_what_plain_gives(install, case):
    install()
    q, k, v, batch = case.inputs()
    attention_plain.write_kv(k, v, batch, 1)
    batch.kv_cache.nan_to_num_()  # only our own kernel does without
    assert flash.select(q.device) is not None
    expected = attention_plain.paged_attention(q, batch, 1, 0.1, case.window)
    torch.testing.assert_close(flash.paged_attention(q, batch, 1, 0.1, case.window), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("installed", "capability", "chosen"),
    [(True, (9, 0), True), (True, (8, 0), False), (True, (7, 5), False), (False, (9, 0), False)],
)
def test_the_library_is_chosen_for_the_card_it_is_made_for_and_told_once(
    install, caplog, installed, capability, chosen
):
    install(installed, capability)
    with caplog.at_level(logging.INFO):
        found = [flash.select(torch.device("cpu")) for _ in range(2)]
    assert [each is not None for each in found] == [chosen] * 2
    (record,) = [record for record in caplog.records if "attention backend" in record.message]
    assert ("backend: FlashAttention-3" if chosen else "Triton (") in record.message


def wrong(*args: object, **options: object) -> torch.Tensor:
    return torch.zeros(7, 4, 64, dtype=torch.bfloat16)


def failing(*args: object, **options: object) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(("function", "reason"), [(wrong, "off by"), (failing, "no kernel image is available")])
def test_a_library_that_fails_its_trial_is_not_used_and_the_reason_is_told(
    install, monkeypatch, caplog, function, reason
):
    install(False)
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = function
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    with caplog.at_level(logging.INFO):
        assert flash.select(torch.device("cpu")) is None
    assert reason in caplog.text


@pytest.mark.parametrize(
    "case",
    [
        CASES["rows"].but(cache_dtype=FLOAT8),
        CASES["rows"].but(dtype=torch.float32),
        CASES["rows"].but(head_dim=12),
        CASES["rows"].but(softcap=1.5),
        CASES["rows"].but(sinks=True),
        CASES["rows"].but(chunk=16),
    ],
    ids=["float8 cache", "float32", "head_dim 12", "capped scores", "sinks", "chunks"],
)
def test_what_a_library_does_not_take_our_own_kernel_computes(install, case):
    install()
    q, k, v, batch = case.inputs()
    attention_plain.write_kv(k, v, batch, 1)
    expected = attention.paged_attention(q, batch, 1, 0.1, **case.scores())
    assert torch.equal(flash.paged_attention(q, batch, 1, 0.1, **case.scores()), expected)
