"""While a model is replaced by another of the same name: no text is begun by one and continued by the other."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from deployments.frontend import retry
from engine.errors import EngineUnavailable, OtherModel
from engine.wire.generate_request import GenerateRequest, ModelIdentity
from engine.wire.sampling_params import SamplingParams
from tests.deployments.replicas.mortal_pool import Death, MortalPool, Outcome, ingress, listen

OLD, NEW = ModelIdentity("old", "words"), ModelIdentity("new", "words")
FOREIGN = ModelIdentity("old", "other words")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "BACK_OFF_S", 0.0)


def refusal(model: ModelIdentity, after: int = 0) -> Death:
    """after: number of tokens that the request has by then."""
    return Death(after, error=OtherModel("a", model.weights, model.vocabulary))


def outcome(*deaths: Death, **fields: Any) -> tuple[Outcome | Exception, list[GenerateRequest], dict[str, int]]:
    """Return the client's response, the attempts as the engines see them, and the replays that were counted."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = GenerateRequest(request_id="a", prompt=[5, 6], params=params, **{"model": OLD, **fields})

    async def scenario() -> tuple[Outcome | Exception, list[GenerateRequest], dict[str, int]]:
        async with ingress() as one:
            pool = MortalPool(one.channel.address, {"a": list(deaths)})
            found: Outcome | Exception
            try:
                found = await listen(one.generation([asked], pool), [asked], pool.heard)
            except OtherModel as error:
                found = error
            finally:
                pool.close()
            return found, pool.requests, {reason: n for reason, n in one.stats.replays.items() if n}

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def test_request_without_output_goes_to_the_new_weights_and_that_is_no_replay():
    expected, _, _ = outcome()
    found, attempts, replays = outcome(refusal(NEW))
    assert found == expected
    assert [attempt.model for attempt in attempts] == [OLD, NEW]
    assert attempts[1] == msgspec.structs.replace(attempts[0], model=NEW, timeout_s=attempts[1].timeout_s)
    assert not replays


def test_request_with_output_waits_for_an_engine_of_the_weights_that_began_it():
    expected, _, _ = outcome()
    found, attempts, replays = outcome(Death(after=3, error=EngineUnavailable("killed")), refusal(NEW, 3))
    assert found == expected
    assert [attempt.model for attempt in attempts] == [OLD, OLD, OLD]
    assert replays == {"engine_unavailable": 1, "other_model": 1}


def test_request_with_output_fails_when_there_are_only_other_weights():
    found, attempts, _ = outcome(Death(after=3, error=EngineUnavailable("killed")), *[refusal(NEW, 3)] * 9)
    assert isinstance(found, OtherModel)
    assert (found.status, found.code) == (503, "other_model")
    assert [attempt.model for attempt in attempts] == [OLD] * 4


def test_request_that_new_weights_began_is_not_continued_by_the_old_ones():
    killed = Death(after=3, error=EngineUnavailable("killed"))
    _, attempts, _ = outcome(refusal(NEW), killed)
    assert [attempt.model for attempt in attempts] == [OLD, NEW, NEW]


def test_prompt_is_not_given_to_a_model_of_another_vocabulary():
    found, attempts, _ = outcome(*[refusal(FOREIGN)] * 9)
    assert isinstance(found, OtherModel)
    assert [attempt.model for attempt in attempts] == [OLD] * 4


def test_request_that_lost_its_engine_before_any_output_is_free_again():
    found, attempts, _ = outcome(refusal(NEW), Death(error=EngineUnavailable("killed")), refusal(NEW))
    assert isinstance(found, Outcome)
    assert [attempt.model for attempt in attempts] == [OLD, NEW, OLD, NEW]
