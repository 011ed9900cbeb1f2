"""Images that an encode engine computes for an engine that answers about them."""

from __future__ import annotations

import time

import pytest

from engine.config import EngineConfig, HandoffConfig
from engine.core.engine import EngineCore
from engine.wire.messages import DispatchPrefill, GenerateRequest, RemotePrefillFailed
from engine.wire.sampling_params import SamplingParams
from tests.vision_models import Prompt, expected_tokens, make_vision_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SIZES = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
LIMIT_S = 60.0


def build(folder, **options) -> EngineCore:
    return EngineCore.build(EngineConfig(model=str(folder), **{**SIZES, **options}))


def run(core: EngineCore, encode: EngineCore | None, *prompts: Prompt) -> list[list[int]]:
    """Answer the prompts together. encode: an engine that takes the images; None if the calls fail."""
    outputs: dict[str, list[int]] = {f"{i}": [] for i in range(len(prompts))}
    for name, prompt in zip(outputs, prompts, strict=True):
        core.add(GenerateRequest(request_id=name, prompt=prompt.tokens, mm_features=prompt.images, params=GREEDY))
    ended, deadline = set(), time.monotonic() + LIMIT_S
    while len(ended) < len(prompts):
        assert time.monotonic() < deadline
        for event in core.step():
            assert event.delta.error is None, event.delta.error
            outputs[event.delta.request_id] += event.delta.token_ids
            ended |= {event.delta.request_id} if event.delta.finish_reason else set()
        for notice in core.take_notices():
            if isinstance(notice, DispatchPrefill):
                if encode is None:
                    core.image_channel.submit(RemotePrefillFailed(notice.request.handoff_id, "gone", True))
                else:
                    assert encode.prefill(notice.request)
        if encode is not None:
            encode.step()
        core.scheduler.check()
    return list(outputs.values())


@pytest.mark.parametrize("name", ["mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_answers_about_images_that_an_encode_engine_has_encoded_are_those_of_one_engine(tmp_path, name):
    folder = make_vision_model(tmp_path, name)
    core = build(folder, encode=HandoffConfig(role="decode", transport="tcp"), max_num_batched_tokens=7)
    encode = build(folder, handoff=HandoffConfig(role="encode", transport="tcp"))
    core.scheduler.encoder_cache.handoffs.available = True
    wanted = [
        Prompt(name).text(5, 6).image(1).text(7, 8, 9),
        Prompt(name).text(*range(3, 16)),
        Prompt(name).image(2, 3, 2).text(11).image(3, 2, 2).image(1, 2, 3).text(12, 13),
    ]
    expected = [expected_tokens(folder, prompt, 8) for prompt in wanted]
    assert run(core, encode, *wanted) == expected
    assert core.stats().images_encoded == 0 and encode.stats().images_encoded == 3
    lost = Prompt(name).text(5, 6).image(7).text(9)
    assert run(core, None, lost) == [expected_tokens(folder, lost, 8)]
    assert core.stats().images_encoded == 1
    core.scheduler.encoder_cache.handoffs.check(len(core.runner._encoder_cache.inbox))
    core.close()
    encode.close()
