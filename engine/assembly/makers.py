"""Makes the parts of an engine's scheduler, each if the engine has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.assembly.loaded import Loaded
from engine.clock import Clock
from engine.core.costs.block_usage import BlockUsage
from engine.core.costs.cost_ledger import nanoseconds
from engine.core.costs.step_cost import StepTimes
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.kv_offload.rank_tiers import RankTiers
from engine.kv_offload.tier_index import TierIndex
from engine.kv_transfer.fingerprint import fingerprint
from engine.model.models.image_encoder import encoder_config
from engine.model.state import DraftBound, state_specs
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.holds.holds import Holds
from engine.parts.holds.no_holds import NoHolds
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_handoffs import ImageHandoffs
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.tier import Tier
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.parts.speculation.speculator import Speculator, any_number
from engine.parts.stages.micro_batches import MicroBatches
from engine.runner.kv_cache import group_needs
from engine.runner.memory import snapshot_bytes
from engine.runner.parts.images import Images
from engine.spec_decode.drafter import HostDrafter
from engine.spec_decode.ngram import NgramDrafter
from engine.spec_decode.suffix import SuffixDrafter
from engine.wire.remote_request import Peer

if TYPE_CHECKING:  # it needs pyzmq, which an engine of one rank without handoffs does without
    from engine.kv_transfer.channel import HandoffChannel


def make_holds(
    loaded: Loaded,
    kv_cache: KVCacheManager,
    offloading: KVOffloading | None,
    usages: list[BlockUsage],
    clock: Clock,
) -> list[Part]:
    config = loaded.config
    if not (config.max_held_share and config.enable_prefix_caching) or loaded.model.bidirectional:
        return [NoHolds()]
    holds = Holds(
        kv_cache,
        offloading,
        usages,
        max_model_len=loaded.runner.max_model_len,
        max_share=config.max_held_share,
        max_share_per_client=config.max_held_share_per_client,
        max_ttl_s=config.max_hold_s,
    )
    holds.update(clock.monotonic())  # restores those on disk, before any block is evicted or too old
    return [holds]


def make_offloading(
    loaded: Loaded, tiers: RankTiers | None, kv_cache: KVCacheManager, step_times: StepTimes, clock: Clock
) -> KVOffloading | None:
    if tiers is None:
        return None
    config, now, found = loaded.config, clock.monotonic(), []
    if tiers.host_slots:
        slots = [TierIndex(count, config.kv_offloading_ttl_s, slots=True) for count in tiers.host_slots]
        found.append(Tier("host", slots, [1] * len(slots), tiers.block_bytes))
    for name, size, sizes in (
        ("disk", config.kv_offloading_disk_size, tiers.disk_sizes),
        ("store", config.kv_offloading_store_size, tiers.store_sizes),
    ):
        if size is not None:
            found.append(Tier(name, [TierIndex(int(size * 2**30), config.kv_offloading_ttl_s)], sizes, [1]))
    for usage in (usage for tier in found for usage in tier.usages):
        usage.now_ns = nanoseconds(now)  # what an earlier start has left counts from now on
    offloading = KVOffloading(
        kv_cache,
        found,
        name_of=tiers.names.of,
        times=step_times,
        timeout_s=config.kv_offloading_timeout_s,
        block_bytes=tiers.block_bytes,
        epoch_s=clock.wall() - now,
        found_holds=tiers.found_holds,
    )
    for block in tiers.found:
        offloading.restore(block.name, block.size, now - block.age_s)
    return offloading


def make_fetching(
    loaded: Loaded,
    channel: HandoffChannel | None,
    kv_cache: KVCacheManager,
    handoffs: Handoffs | None,
    offloading: KVOffloading | None,
    step_times: StepTimes,
) -> list[Part]:
    config = loaded.config.handoff
    if config is None or handoffs is None or channel is None or config.role not in ("decode", "replica"):
        return []
    if not config.enable_prefix_fetching:
        return []
    fetching = KVFetching(
        kv_cache,
        handoffs,
        offloading,
        peer=channel.peer,
        times=step_times,
        timeout_s=config.fetch_timeout_s,
        block_bytes=block_bytes(loaded),
    )
    return [fetching]


def block_bytes(loaded: Loaded) -> list[int]:
    """Return the bytes of a block of each KV cache group, on all ranks of all stages together. If there are snapshots
    of recurrent states, the bytes of one come last."""
    model, runner, tp = loaded.model, loaded.runner, loaded.runner.tp
    needs = group_needs(loaded.config, runner.block_size, model, runner.kv_dtype, tp)
    sizes = [need.block_bytes for need in needs]
    if runner.states.num_snapshots:
        sizes.append(snapshot_bytes(state_specs(model.recurrent, str(runner.dtype).removeprefix("torch."), tp.size)))
    return [size * tp.size for size in sizes]


def make_micro_batches(loaded: Loaded) -> list[Part]:
    stages, vision = loaded.config.pipeline_parallel_size, loaded.model.vision
    if stages == 1:
        return []
    return [MicroBatches(stages, 0 if vision is None else vision.mm_tokens_per_image)]


def make_images(loaded: Loaded, peer: Peer | None) -> list[Part]:
    """peer: this engine as encode engines address it; None if there are none."""
    config, runner, vision = loaded.config, loaded.runner, loaded.model.vision
    if vision is None:
        return []
    images = EncoderCacheManager(
        config.encoder_cache_size, config.max_num_batched_tokens, vision.image_token_id, vision.mm_tokens_per_image
    )
    if peer is not None and (inbox := runner.parts[Images].inbox) is not None:
        encoder, dtype, block_size = encoder_config(loaded.model), runner.dtype, runner.block_size
        images.handoffs = ImageHandoffs(
            peer,
            fingerprint=fingerprint(encoder, loaded.folder, dtype, dtype, block_size, config.determinism),
            image_token_id=vision.image_token_id,
            num_blocks=len(inbox),
            block_size=block_size,
        )
    return [images]


def make_speculation(loaded: Loaded, step_times: StepTimes) -> list[Part]:
    config = loaded.config.speculative_config
    if config is None or loaded.model.head != "lm":
        return []
    drafter: HostDrafter | None = None
    if config.method == "ngram":
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "suffix":
        drafter = SuffixDrafter(config)
    recurrent = loaded.model.recurrent
    bound = any_number if recurrent is None else DraftBound(recurrent.kernel)
    costs, stages = step_times.drafting.of, loaded.config.pipeline_parallel_size
    return [Speculator(config, drafter, costs, loaded.model.vocab_size, bound, stages=stages)]


def make_adapters(loaded: Loaded) -> list[Part]:
    return [AdapterSlots(loaded.config.lora_slots)] if loaded.config.enable_lora else []
