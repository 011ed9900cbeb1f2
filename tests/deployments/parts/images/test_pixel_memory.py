from __future__ import annotations

import asyncio

import numpy as np

from deployments.parts.images.pixel_memory import PixelMemory
from engine.multimodal.processor import ProcessedImage
from engine.wire.parts.images import TensorData


def image(size: int) -> ProcessedImage:
    data = {"pixel_values": TensorData.of(np.zeros(size, np.uint8))}
    return ProcessedImage(data=data, mm_hash=b"", placeholders="", num_embeds=1)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_images_count_until_nothing_refers_to_them_and_who_waits_goes_on_in_turn():
    memory, order = PixelMemory(10), []

    async def take(name: str, size: int) -> None:
        async with memory.reserve(size):
            order.append(name)

    held = image(6)
    pixels = held.data["pixel_values"]
    memory.hold(held)
    waiting = [asyncio.create_task(take(name, size)) for name, size in (("large", 5), ("small", 1))]
    await settle()
    assert memory.used == 6 and order == []  # the small one waits behind the large one
    del held
    await settle()
    assert memory.used == 6 and order == []
    del pixels
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]
    await take("larger than all", 100)
    assert memory.used == 0


async def test_a_request_that_is_given_up_while_it_waits_leaves_its_place():
    memory = PixelMemory(10)
    held = image(8)
    memory.hold(held)
    order = []

    async def take(size: int) -> None:
        async with memory.reserve(size):
            order.append(size)

    gone, next_one = asyncio.create_task(take(9)), asyncio.create_task(take(7))
    await settle()
    gone.cancel()
    await settle()
    del held
    await asyncio.wait_for(next_one, 60)
    assert order == [7] and gone.cancelled() and memory.used == 0


async def test_a_turn_that_comes_with_the_cancellation_is_given_on():
    memory = PixelMemory(10)
    held = image(8)
    memory.hold(held)

    async def take() -> None:
        async with memory.reserve(9):
            raise AssertionError("was cancelled")

    task = asyncio.create_task(take())
    await settle()
    memory._free(8)  # its turn has come, but it has not run yet
    task.cancel()
    await settle()
    assert task.cancelled()
    memory.used += 8
    del held
    await settle()
    assert memory.used == 0
