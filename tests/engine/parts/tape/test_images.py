"""The tapes of engines with images."""

from __future__ import annotations

import msgspec

from cluster.lab.tape.replay import Replay
from engine.core.engine import EngineCore
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_courier import ImageCourier
from engine.parts.images.inputs import EncodersSet
from engine.wire.parts.handoffs import PrefillReplica, RemoteRequestFailed
from tests.engine.core.test_images import engine
from tests.engine.core.test_images import run as run_alone
from tests.engine.parts.images.test_image_handoffs import by, engines, prompts, run
from tests.engine.parts.tape.taped import tape_of
from tests.vision_models import Prompt, make_vision_model

NAME = "qwen3_vl"


def replayed(core: EngineCore) -> Replay:
    tape = tape_of(core.journal)
    replay = Replay(tape)
    for moment in replay.run():
        replay.scheduler.check()
        if moment.commits and replay.position % 7 == 0:  # states in between have images too
            replay.go_to(replay.position - 3)
            replay.go_to(replay.position + 3)
    assert replay.scheduler.totals == core.scheduler.totals
    return replay


def test_images_are_encoded_and_evicted_again(tmp_path):
    folder = make_vision_model(tmp_path, NAME)
    core = engine(folder, max_num_batched_tokens=5, encoder_cache_size=12, tape_mib=16)
    for _ in range(2):
        run_alone(core, *prompts(NAME))
    found = replayed(core).scheduler.parts[EncoderCacheManager]
    images = core.scheduler.parts[EncoderCacheManager]
    assert (found.num_encoded, found.num_hits, found.num_embeds) == (
        images.num_encoded, images.num_hits, images.num_embeds
    )  # fmt: skip
    assert images.num_encoded >= 3
    core.close()


def test_images_of_an_encode_engine_arrive_and_fail_again_in_both_engines(tmp_path):
    folder = make_vision_model(tmp_path, NAME)
    with engines(folder, tape_mib=16) as (core, encode):
        core.apply(EncodersSet([PrefillReplica(engine_id="engine")]))
        by(encode, core, *prompts(NAME))
        lost = Prompt(NAME).text(5, 6).image(7).text(9)
        run(core, lost, dispatch=lambda notice: core.mail[ImageCourier].channel.submit(
            RemoteRequestFailed(notice.request.handoff_id, "gone", True)
        ))  # fmt: skip
        here, there = replayed(core), replayed(encode)
        assert {"AddedShape", "ImageShape", "EncodersSet"} <= {type(moment.input).__name__ for moment in here.moments}
        assert "AddedRemoteShape" in {type(moment.input).__name__ for moment in there.moments}
        assert (
            here.scheduler.parts[EncoderCacheManager].num_encoded
            == core.scheduler.parts[EncoderCacheManager].num_encoded
            == 1
        )
        secret = prompts(NAME)[0].images[0].mm_hash
        data = msgspec.msgpack.encode(tape_of(core.journal))
        assert secret not in data and secret.hex().encode() not in data
