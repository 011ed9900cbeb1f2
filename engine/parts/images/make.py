"""Makes the images of an engine."""

from __future__ import annotations

from engine.core.mail.courier import Courier
from engine.kv_transfer.fingerprint import fingerprint
from engine.model.models.images.encoder_config import encoder_config
from engine.parts.handoffs.open_channel import open_channel
from engine.parts.images.encoder_cache_manager import EncoderCacheManager, NoImages
from engine.parts.images.image_courier import ImageCourier
from engine.parts.images.image_handoffs import ImageHandoffs
from engine.parts.images.rank.images import Images
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    loaded, couriers = setup.loaded, list[Courier]()
    config, runner, vision = loaded.config, loaded.runner, loaded.model.vision
    if vision is None:
        return Made([NoImages()])
    images = EncoderCacheManager(
        config.encoder_cache_size, config.max_num_batched_tokens, vision.image_token_id, vision.mm_tokens_per_image
    )
    rank = runner.parts[Images]
    if config.encode is not None and rank.inbox is not None:
        channel = open_channel(setup, config.encode, rank.of_ranks)
        couriers.append(ImageCourier(channel, images))
        encoder, dtype, block_size = encoder_config(loaded.model), runner.dtype, runner.block_size
        images.handoffs = ImageHandoffs(
            channel.peer,
            fingerprint=fingerprint(encoder, loaded.folder, dtype, dtype, block_size, config.determinism),
            image_token_id=vision.image_token_id,
            num_blocks=len(rank.inbox),
            block_size=block_size,
        )
    return Made([images], couriers)
