"""KV blocks between caches on the card: what each transport reads is what lies there."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.kv_transfer.transport.base import BlockReads, KVTransport, Region
from engine.kv_transfer.transport.head_map import HeadPart
from engine.kv_transfer.transport.memory import BlockMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BLOCKS, LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM = 64, 4, 4, 16, 64
PROGRESS_S = 20.0


def cache() -> torch.Tensor:
    shape = (BLOCKS, LAYERS, 2, HEADS, BLOCK_SIZE, HEAD_DIM)
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(torch.bfloat16)


def open_transport(name: str, memory: BlockMemory) -> KVTransport:
    if name == "tcp":
        if importlib.util.find_spec("xxhash") is None:
            pytest.skip("xxhash is not installed")
        from engine.kv_transfer.transport.tcp import TcpTransport

        return TcpTransport(memory, "127.0.0.1", PROGRESS_S)
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    from engine.kv_transfer.transport.nixl import NixlTransport

    return NixlTransport(memory, PROGRESS_S, "127.0.0.1")


def blocks(count: int) -> list[int]:
    return random.Random(count).sample(range(BLOCKS), count)


def test_memory_gathers_and_scatters_heads_of_blocks_on_the_card():
    source, target = cache(), torch.zeros_like(cache())
    taken, put = blocks(11), blocks(12)[:11]
    part = Region(head=1, heads=2, slab=0, slabs=2 * LAYERS)
    BlockMemory(target).scatter(put, part, BlockMemory(source).gather(taken, part))
    torch.testing.assert_close(target[put][:, :, :, 1:3], source[taken][:, :, :, 1:3], rtol=0, atol=0)
    untouched = [block for block in range(BLOCKS) if block not in put]
    assert not target[untouched].any() and not target[:, :, :, :1].any()


def test_what_a_step_has_written_is_what_is_gathered():
    """The copy runs on a stream of its own: it must come after what the step before has put into the queue, once the
    step's end has been waited for."""
    source = cache()
    memory = BlockMemory(source)
    for value in range(20):
        torch.cuda._sleep(20_000_000)  # a step that takes 10 ms
        source.fill_(value)
        end = torch.cuda.Event()
        end.record()
        end.synchronize()
        found = torch.from_numpy(memory.gather([3, 9], Region(head=0, heads=HEADS, slab=0, slabs=2 * LAYERS))).view(
            torch.bfloat16
        )
        assert (found == value).all()


@pytest.mark.parametrize("name", ["tcp", "nixl"])
@pytest.mark.parametrize("part", [HeadPart(0, 0, 0, HEADS), HeadPart(0, 1, 2, 2)], ids=["whole blocks", "some heads"])
def test_blocks_arrive_as_they_were(name, part):
    source = cache()
    target = torch.zeros_like(source)
    giver, taker = open_transport(name, BlockMemory(source)), open_transport(name, BlockMemory(target))
    try:
        remote, local = blocks(40), list(reversed(blocks(41)[:40]))
        size = taker.read(giver.describe(), BlockReads(remote, local, part), threading.Event())
        here, there = (
            slice(part.local_start, part.local_start + part.count),
            slice(part.remote_start, part.remote_start + part.count),
        )
        torch.testing.assert_close(
            target[local][:, :, :, here].cpu(), source[remote][:, :, :, there].cpu(), rtol=0, atol=0
        )
        assert size == 40 * LAYERS * 2 * part.count * BLOCK_SIZE * HEAD_DIM * 2
    finally:
        taker.close()
        giver.close()


def test_a_fresh_thread_that_enters_has_a_context():
    driver, memory = ctypes.CDLL("libcuda.so.1"), BlockMemory(cache())
    contexts = []

    def enter():
        for _ in range(2):
            context = ctypes.c_void_p()
            assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
            contexts.append(context.value)
            memory.enter_thread()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert contexts[0] is None and contexts[1] is not None


def test_nixl_reads_from_a_fresh_thread():
    source = cache()
    target = torch.zeros_like(source)
    giver, taker = (open_transport("nixl", BlockMemory(memory)) for memory in (source, target))
    reads = BlockReads(list(range(40)), list(range(40)), HeadPart(0, 0, 0, HEADS))
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(taker.read, giver.describe(), reads, threading.Event()).result(PROGRESS_S)
        torch.testing.assert_close(target[:40], source[:40], rtol=0, atol=0)
    finally:
        taker.close()
        giver.close()
