"""Texts that go on in an engine of another version say where its numerics begin."""

from __future__ import annotations

import logging

import msgspec
import pytest

from deployments.frontend import retry, sequence
from deployments.openai.response_bodies import NumericsBorder, UsageBody
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenBatch, TokenDelta
from tests.deployments.replicas.mortal_pool import Death, MortalPool, ingress, listen


class Roll(MortalPool):
    """The attempts of a sequence reach engines with these numerics, one after the other."""

    def __init__(self, reply_to: str, deaths: dict[str, list[Death]], numerics: list[str]):
        super().__init__(reply_to, deaths)
        self.numerics = numerics

    async def _send(self, delta: TokenDelta) -> None:
        attempt = int(delta.request_id.partition(".")[2] or 0)
        batch = TokenBatch(
            engine_id="e", commands_to="tcp://127.0.0.1:9", step=0, deltas=[delta], numerics=self.numerics[attempt]
        )
        await self._socket.send(msgspec.msgpack.encode(batch))


async def borders(numerics: list[str], *deaths: int) -> list[NumericsBorder] | msgspec.UnsetType:
    """What the usage says if engines die after so many tokens."""
    asked = [GenerateRequest(request_id="a", prompt=[5, 6, 7], params=SamplingParams(max_tokens=24, min_tokens=12))]
    async with ingress() as one:
        pool = Roll(one.channel.address, {"a": [Death(after) for after in deaths]}, numerics)
        generation = one.generation(asked, pool)
        await listen(generation, asked, pool.heard)
        pool.close()
        return UsageBody.of(generation.usage).numerics_borders


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "BACK_OFF_S", 0.0)
    monkeypatch.setattr(sequence, "FINAL_DELTA_S", 0.0)


@pytest.mark.parametrize(
    ("numerics", "deaths", "found"),
    [
        (["old"], [], msgspec.UNSET),
        (["old", "old"], [4], msgspec.UNSET),
        (["old", "new"], [4], [NumericsBorder(0, 4)]),
        (["old", "new"], [0], msgspec.UNSET),
        (["old", "new", "old"], [4, 9], [NumericsBorder(0, 4), NumericsBorder(0, 9)]),
        (["old", "new", "new"], [4, 9], [NumericsBorder(0, 4)]),
        (["", "new"], [4], [NumericsBorder(0, 4)]),
        (["new", ""], [4], [NumericsBorder(0, 4)]),
        (["", ""], [4], msgspec.UNSET),
    ],
    ids=[
        "one engine", "another of the same version", "the next version", "before the first token", "back again",
        "the next version twice", "a version that tells none", "and back to it", "two that tell none",
    ],
)  # fmt: skip
async def test_usage_says_after_which_tokens_other_numerics_begin(numerics, deaths, found):
    assert await borders(numerics, *deaths) == found


async def test_the_log_names_both_numerics(caplog):
    caplog.set_level(logging.INFO)
    await borders(["old", "new"], 4)
    (line,) = [record.message for record in caplog.records if "other numerics" in record.message]
    assert line == "request goes on with other numerics request_id=a tokens=4 numerics=new before=old"
