"""What the configuration says of tapes reaches routers and queues."""

from __future__ import annotations

import pytest

from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.model_info import model_info
from deployments.parts.tape.choice_log import ChoiceLog
from deployments.parts.tape.slo_alarm import LATE
from deployments.parts.tape.tape_settings import TapeSettings, settings_of
from engine.pocket import PATH
from tests.deployments.fake_api import FakeApi, fake_api, until
from tests.deployments.parts.tape.fake_tapes import FakeTapes

LATE_AT_ONCE = {"tape": TapeSettings(max_mib=1, ttft_s=1e-9)}


async def ask(api: FakeApi) -> None:
    await api.post("completions", prompt="a", max_tokens=1)


@pytest.mark.parametrize(("tape_mib", "expected"), [(0, None), (4, TapeSettings(max_mib=4, ttft_s=0.25))])
def test_a_model_has_a_tape_unless_it_takes_no_memory(tape_mib, expected):
    model = ModelSection(name="m", model=str(PATH), engine={"tape_mib": tape_mib}, slo={"ttft_ms": 250})
    assert settings_of(model_info(model, IngressSection())) == expected


async def test_a_router_tells_its_choices_to_a_log_if_the_model_has_a_tape():
    async with fake_api(of=LATE_AT_ONCE) as api:
        assert isinstance(api.pool.observer, ChoiceLog)
    async with fake_api() as api:
        assert not isinstance(api.pool.observer, ChoiceLog)


async def test_replicas_are_told_when_first_tokens_begin_to_be_late():
    async with fake_api(of=LATE_AT_ONCE) as api:
        tapes = FakeTapes(api)
        for _ in range(LATE):
            await ask(api)
        assert tapes.late == []
        for _ in range(LATE):
            await ask(api)
        await until(lambda: tapes.late)
        assert tapes.late == [f"{LATE + 1} of the newest {LATE + 1} first tokens came after more than 1e-09 s"]


async def test_without_a_tape_late_first_tokens_are_told_to_no_one():
    async with fake_api() as api:
        assert api.model.admission.first_token_observers == []
