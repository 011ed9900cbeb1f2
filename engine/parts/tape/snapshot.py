"""The state of a scheduler in bytes, without text: from there a tape can be replayed.

A scheduler consists of many small objects that refer to each other, so its state is a graph of them. A tape comes from
another machine: `load` makes only objects of the classes below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.core.block_allocator import BlockAllocator
from engine.core.block_pool import BlockPool
from engine.core.door.journal import NOBODY_LISTENS
from engine.core.door.kernel import ModelLimits
from engine.core.door.offers import Offers, unknown
from engine.core.door.outputs import Outputs
from engine.core.door.part import HOOKS, Part, Parts
from engine.core.door.request_checks import RequestChecks
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.output import StopConditions
from engine.core.request import (
    BlockTable,
    PrefixUse,
    RemotePrompt,
    Request,
    RequestClock,
    RequestStates,
    State,
    StateSnapshot,
)
from engine.core.request_queue import RequestQueue
from engine.core.scheduler import Scheduler
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.core.stats import RequestMetrics, SchedulerStats
from engine.core.step_plan_builder import StepPlanBuilder
from engine.costs.request_cost import COSTS, BlockAccount, KVCost, RequestCost
from engine.costs.step_cost import DecodeCost, LinearCost, StepCost, StepTimes
from engine.costs.tier_usage import HeldBlock, TierUsage
from engine.hooks import overrides
from engine.kv_offload.tier_index import NoUsage, TierEntry, TierIndex
from engine.model.kv_groups import KVCacheSpec
from engine.model.state import DraftBound
from engine.options.handoff import HandoffConfig
from engine.options.speculation import SpeculativeConfig
from engine.parts.costs.cost_accounts import CostAccounts
from engine.parts.grammar.grammars import Grammars
from engine.parts.handoffs.handoff_requests import HandoffRequests
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.prompts_for_others import PromptsForOthers
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.parts.handoffs.remote_prompts import RemotePrompts
from engine.parts.holds.hold_records import HoldRecords
from engine.parts.holds.hold_table import Hold, HoldTable, PromptOfHold
from engine.parts.holds.holds import Holds
from engine.parts.holds.no_holds import NoHolds
from engine.parts.holds.request_holds import RequestHolds
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_handoffs import ImageHandoffs, NoImageHandoffs, number_of
from engine.parts.kv_fetching.kv_fetching import KVFetching, PendingFetch
from engine.parts.kv_groups.state_cache_manager import StateCacheManager, StateSnapshots
from engine.parts.kv_groups.windowed_kv_cache import WindowedKVCacheManager, WindowRoom
from engine.parts.kv_tiers.command_queue import CommandQueue
from engine.parts.kv_tiers.kv_offloading import BlockLoad, KVOffloading, NoTiersBelow
from engine.parts.kv_tiers.saved_holds import FoundHold, Kept, SavedHolds
from engine.parts.kv_tiers.tier import NoHashes, Tier, TierHashes
from engine.parts.kv_tiers.tier_writer import Store, TierWriter
from engine.parts.lora.adapter_slots import AdapterSlot, AdapterSlots
from engine.parts.speculation.draft_totals import DraftTotals
from engine.parts.speculation.speculator import Speculator, any_number
from engine.parts.stages.micro_batches import MicroBatches
from engine.parts.tape.answers import (
    NO_TOKEN,
    ORDINARY,
    STAND_INS,
    Answers,
    DrafterWatch,
    NoDrafter,
    TapedDrafter,
    TapedGrammar,
    TapedNames,
)
from engine.parts.tape.inputs import lora_without_path, params_without_text
from engine.parts.tape.object_graph import (
    GraphReader,
    GraphWriter,
    Kinds,
    UnknownState,
    Zeros,
    check_schema,
    with_changed_hashes,
)
from engine.spec_decode.draft_cost import DraftCost, ProposalCost, StepMean, VerifyingCost
from engine.spec_decode.draft_length import SequenceDrafts, StepDrafts
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.handoff import BlocksAsked, HeldBlocks, PromptCost
from engine.wire.lora import AdapterLoad, LoRARequest
from engine.wire.messages import PrefillReplica
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.parts.holds import HoldMark
from engine.wire.parts.images import ImageStep, ReceivedImage, SequenceImages
from engine.wire.parts.kv_offload import (
    DropBlocks,
    DropHold,
    LoadBlocks,
    SavedHold,
    SaveHold,
    StopLoad,
    StoreBlocks,
    TierBlock,
)
from engine.wire.parts.lora import SequenceAdapter
from engine.wire.parts.states import StateRestore, StateSave, StateStep
from engine.wire.plan import ON_DEVICE, StepPlan
from engine.wire.pooling_params import PoolingParams
from engine.wire.remote_request import NOBODY, KVHolder, KVSource, Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.histogram import Histogram
from engine.wire.token_delta import HoldOutcome

KINDS = Kinds()
KINDS.add_objects(
    AdapterSlot, AdapterSlots, BlockAccount, BlockAllocator, BlockLoad, BlockPool, BlockTable, BlocksAsked,
    CommandQueue, CostAccounts, DecodeCost, DraftBound, DraftCost, DraftTotals, EncoderCacheManager, FoundHold,
    Grammars, HandoffRequests, Handoffs, HeldBlock, Hold, HoldRecords, HoldTable, Holds, ImageHandoffs, KVCacheManager,
    KVCost, KVFetching, KVOffloading, Kept, LinearCost, MicroBatches, ModelLimits, PromptsForOthers,
    NoDrafter, NoHashes, NoHolds, NoImageHandoffs, NoTiersBelow, NoUsage,
    Offers, Outputs, Parts, PendingFetch, PrefixUse, PromptOfHold, ProposalCost, RemotePrefillPolicy,
    RemotePrompts,
    RemotePrompt, Request, RequestChecks, RequestClock, RequestCost, RequestHolds, RequestMetrics, RequestQueue,
    RequestStates, SavedHolds,
    Scheduler, SchedulerStats, SequenceDrafts, SingleTypeKVCacheManager,
    Speculator, StateCacheManager, StateSnapshots, StepCost, StepDrafts, StepMean,
    StepPlanBuilder, StepTimes, StopConditions, Store, Tier, TierEntry, TierHashes, TierIndex, TierUsage,
    TierWriter, VerifyingCost, WindowRoom, WindowedKVCacheManager,
)  # fmt: skip
KINDS.add_objects(*STAND_INS, given="_answers")
KINDS.messages += [
    AdapterLoad, DropBlocks, DropHold, EngineConfig, HandoffConfig, Histogram, HoldMark, HoldOutcome, KVCacheSpec,
    KVHolder, KVSource, LoRARequest, LoadBlocks, MultiModalFeatureSpec, Peer, PoolingParams, PrefillReplica, PromptCost,
    ImageStep, ReceivedImage, RemoteRequest, SamplingParams, SaveHold, SavedHold, SequenceAdapter, SequenceImages,
    SpeculativeConfig, StateStep, StepPlan,
    StopLoad, StoreBlocks,
]  # fmt: skip
KINDS.rows += [HeldBlocks, StateRestore, StateSave, StateSnapshot, TierBlock]
KINDS.constants |= {str(state): state for state in State}
KINDS.constants |= {
    "nobody": NOBODY, "nobody listens": NOBODY_LISTENS, "any number": any_number,
    "unknown": unknown,    "BlockAccount": BlockAccount,
}  # fmt: skip
KINDS.methods += [
    (CommandQueue, "add"), (DraftCost, "of"), (StepTimes, "compute_s"), (Handoffs, "compute_s"), (KVFetching, "heard"),
]  # fmt: skip
KINDS.methods += [
    (told.kind, hook)
    for told in KINDS.objects
    if issubclass(told.kind, Part)
    for hook in HOOKS
    if overrides(told.kind, getattr(Part, hook))
]


# -- what a state leaves out -------------------------------------------------------------------------------


def of_request(request: Request) -> dict[str, Any]:
    return {
        "tokens": Zeros(len(request.tokens)),
        "reply_to": "",
        "timeline": [],
        "prompt_logprobs": None if request.prompt_logprobs is None else [None],
        "of": {name: kept for name, kept in request.of.items() if name != COSTS},
    }


def of_drafts(drafts: SequenceDrafts) -> dict[str, Any]:
    proposed = [token if token == ON_DEVICE else ORDINARY if token >= 0 else NO_TOKEN for token in drafts.proposed]
    return {"prediction": [ORDINARY] if drafts.prediction else [], "proposed": proposed}


def of_prompt(prompt: PromptOfHold) -> dict[str, Any]:
    return {"tokens": Zeros(len(prompt.tokens), packed=True), "cache_salt": ""}


def of_image_handoffs(handoffs: ImageHandoffs) -> dict[str, Any]:
    receiving = {number_of(handoff_id): image for handoff_id, image in handoffs.receiving.items()}
    return {"receiving": receiving}


CHANGES: dict[type, Callable[[Any], dict[str, Any]]] = {
    Scheduler: lambda _: {"journal": NOBODY_LISTENS},
    Request: of_request,
    SequenceDrafts: of_drafts,
    Hold: lambda _: {"of": {}},
    PromptOfHold: of_prompt,
    HoldTable: lambda _: {"_usages": []},
    BlockPool: lambda _: {"observers": []},
    Grammars: lambda part: {"waiting": dict.fromkeys(part.waiting, ""), "watch": None},
    ImageHandoffs: of_image_handoffs,
    PrefixUse: lambda _: {"hashes": [], "salt": ""},
    Outputs: lambda _: {"events": [], "_posted": {}},
    EncoderCacheManager: lambda _: {"_pixels": {}},
    Speculator: lambda part: {"_drafter": None if part.has_weights else NoDrafter()},
}


def plan_without_text(plan: StepPlan) -> StepPlan:
    drafts = {entry: [ORDINARY] * len(tokens) for entry, tokens in plan.drafts.items()}
    parts = {name: record.without_text() for name, record in plan.parts.items()}
    return msgspec.structs.replace(plan, added=[], blocks=[], masks=b"", drafts=drafts, parts=parts)


def remote_request_without_text(asked: RemoteRequest, vocab_size: int) -> RemoteRequest:
    return msgspec.structs.replace(
        asked,
        token_ids=[],
        params=params_without_text(asked.params, vocab_size),
        cache_salt="",
        mm_features=list(map(image_without_pixels, asked.mm_features)),
        lora=lora_without_path(asked.lora),
    )


def image_without_pixels(image: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    return msgspec.structs.replace(image, data={})


def stand_ins(vocab_size: int) -> dict[type, Any]:
    """Return what is written instead of objects of some classes."""
    taped = (TapedDrafter, DrafterWatch, TapedGrammar, TapedNames)
    return dict.fromkeys(taped, lambda part: part.replayed()) | {
        StepPlan: plan_without_text,
        RemoteRequest: partial(remote_request_without_text, vocab_size=vocab_size),
        SamplingParams: partial(params_without_text, vocab_size=vocab_size),
        LoRARequest: lora_without_path,
        AdapterLoad: lambda load: msgspec.structs.replace(load, lora=lora_without_path(load.lora)),
        MultiModalFeatureSpec: image_without_pixels,
    }


# -- reading and writing -----------------------------------------------------------------------------------


def dump(scheduler: Scheduler, times: StepTimes) -> bytes:
    """Return the state of a scheduler. times: step times on which its decisions depend."""
    return GraphWriter(KINDS, stand_ins(scheduler.limits.vocab_size), CHANGES).write(scheduler, times)


def load(state: bytes, answers: Answers) -> tuple[Scheduler, StepTimes]:
    """Return a scheduler in this state, and its step times. Requests have no tokens and no hashes of blocks. Raises
    UnknownState.

    answers: what drafters, grammars and links have answered from then on.
    """
    roots = GraphReader(KINDS, answers).read(state)
    if [type(root) for root in roots] != [Scheduler, StepTimes]:
        raise UnknownState("it is no scheduler")
    scheduler, times = roots
    return scheduler, times


def with_key(state: bytes, key: bytes) -> bytes:
    """Return a state in which every hash is replaced by a hash with a key, so that nobody can confirm a guess. Raises
    UnknownState."""
    check_schema(state, KINDS)
    return with_changed_hashes(state, partial(hashes_with_key, key=key))


def hashes_with_key(hashes: bytes, key: bytes) -> bytes:
    """Replace each of some joined hashes by one with a key."""
    size = BLOCK_HASH_BYTES
    parts = (hashes[i : i + size] for i in range(0, len(hashes), size))
    return b"".join(blake2b(part, digest_size=size, key=key).digest() for part in parts)
