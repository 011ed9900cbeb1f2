"""An engine that only encodes images: its KV blocks hold their embeddings."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.images.rank.images import Images
from engine.wire.parts.images import ImageStats, PlaceholderRange, PromptImages
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from tests.vision_models import IMAGE, Prompt, make_vision_model


@pytest.mark.parametrize("name", ["mistral3", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("budget", [5, 64])
def test_the_blocks_of_an_encode_engine_hold_the_embeddings_of_images_bit_for_bit(tmp_path, name, budget):
    folder = make_vision_model(tmp_path, name)
    options = {"block_size": 4, "num_gpu_blocks_override": 32, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
    local = build_engine(EngineConfig(model=str(folder), **options))
    handoff = HandoffConfig(role="encode", transport="tcp")
    options |= {
        "max_num_batched_tokens": budget,
        "enable_expert_parallel": True,
    }  # the latter of the language model only
    core = build_engine(EngineConfig(model=str(folder), handoff=handoff, **options))
    (image,) = Prompt(name).image(1, 3, 3).images
    (expected,) = local.ranks.runner.parts[Images].cache._encode([image]).values()
    image = msgspec.structs.replace(image, mm_position=PlaceholderRange(0, image.num_embeds))
    for number in range(2):
        request = RemoteRequest(
            handoff_id=f"h{number}",
            request_id="r",
            attempt=1,
            token_ids=[IMAGE] * image.num_embeds,
            num_prompt=image.num_embeds,
            params=SamplingParams(temperature=0.0),
            seed=1,
            cache_salt="",
            skip=0,
            fingerprint=core.scheduler.parts[Handoffs].requests.fingerprint,
            decode=Peer("decode", core.mail[HandoffCourier].channel.peer.address, 1),
        ).asking(PromptImages([image]))
        assert core.mail[HandoffCourier].prefill(core, request)
        blocks = []
        for _ in range(20):
            core.step()
            leased = core.scheduler.parts[Handoffs].for_others.leased.get(f"h{number}")
            if leased is not None:
                blocks = leased.tables[0].blocks
                break
        levels = expected.shape[1] // core.model_config.hidden_size
        cache = core.ranks.runner.kv_caches[0][blocks]  # [blocks, levels, 2, 1, block_size, hidden / 2]
        rows = cache.permute(0, 4, 1, 2, 3, 5).reshape(-1, levels * core.model_config.hidden_size)
        assert torch.equal(rows[: image.num_embeds], expected)
    assert core.stats().record(ImageStats).encoded == 1, "the second time the image is found by its hash"
    core.close()
    local.close()
