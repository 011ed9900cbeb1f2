"""How much memory a process takes that is sent images by anybody."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from PIL import Image

from tests.deployments.parts.images.test_images import BAD, api_with_images, data_url, image_part, text_part, user
from tests.engine.multimodal.images import file_of, picture

SIDE = 2048
LIMITS = {"max_pixels": SIDE**2, "max_bytes": 2**21, "max_in_flight": 4, "max_processing": 2, "fetch_timeout_s": 60.0}
BYTES_PER_PIXEL = 16  # as ImageConfig.max_pixels says
ELSE = 64 * 2**20
"""Bytes for threads, sockets, and what malloc keeps."""


def peak_bytes() -> int:
    """Of this process only; `ru_maxrss` begins with the peak of the one that has started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def flood(folder: Path, result: Connection) -> None:
    """Send the bytes by which the highest memory of this process grows while it is sent images."""
    flat = picture(8, 8).resize((SIDE, SIDE), Image.Resampling.NEAREST)  # files of some kilobytes, as bombs are
    large = [data_url(file_of(image, kind)) for image, kind in ((flat, "JPEG"), (flat.convert("RGBA"), "PNG"))]

    async def scenario() -> None:
        async with api_with_images(folder, **LIMITS) as (api, server):
            bad = [json.loads(json.dumps(one).replace("SERVER", server.url)) for one, _ in BAD]
            bad = [part if isinstance(part, dict) else image_part(part) for part in bad]

            async def ask(part: object) -> int:
                answer = await api.post("chat/completions", messages=user(text_part("look"), part), max_tokens=2)
                return answer.status_code

            assert await ask(image_part(data_url(file_of(picture(40, 24))))) == 200
            gc.collect()
            before = peak_bytes()
            parts = [*bad, *map(image_part, large * 12)]
            random.Random(0).shuffle(parts)
            statuses = await asyncio.gather(*map(ask, parts))
            assert statuses.count(200) >= 24 and set(statuses) == {200, 400}
            result.send(peak_bytes() - before)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_flood_of_large_and_bad_images_takes_no_more_memory_than_the_limits_allow(tmp_path):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=flood, args=(tmp_path, sender))
    process.start()
    sender.close()
    grown = receiver.recv()
    process.join(60)
    assert process.exitcode == 0
    in_processing = LIMITS["max_processing"] * LIMITS["max_pixels"] * BYTES_PER_PIXEL
    assert grown <= in_processing + LIMITS["max_in_flight"] * LIMITS["max_bytes"] + ELSE
