"""The state of a scheduler in bytes, without text: from there a tape can be replayed.

A scheduler consists of many small objects that refer to each other, so its state is a graph of them. A tape comes from
another machine: `load` makes only objects of the classes below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from engine.core.prompt_budget import PromptBudget
from engine.core.request import BlockTable, PrefixUse, Request, RequestClock, State
from engine.core.request_queue import RequestQueue
from engine.core.scheduler import Scheduler
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.core.stats import RequestMetrics, SchedulerStats
from engine.core.step_plan_builder import StepPlanBuilder
from engine.costs.step_cost import DecodeCost, LinearCost, StepCost, StepTimes
from engine.hooks import overrides
from engine.model.kv_groups import KVCacheSpec
from engine.parts.images.snapshot_kinds import without_data
from engine.parts.snapshot_kinds import ORDINARY, SnapshotKinds, Zeros
from engine.parts.table import part_modules
from engine.parts.tape.answers import STAND_INS, Answers, DrafterWatch, TapedDrafter, TapedGrammar, TapedNames
from engine.parts.tape.inputs import params_without_text, remote_without_text
from engine.parts.tape.object_graph import GraphReader, GraphWriter, Kinds, UnknownState
from engine.wire.parts.images import PromptImages, images_in
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.plan import BlockChange, StepPlan
from engine.wire.remote_request import NOBODY, KVSource, Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.histogram import Histogram

OF_PARTS: list[SnapshotKinds] = [module.KINDS for module in part_modules("snapshot_kinds")]
"""What each part adds that keeps something of a request or a step."""
KINDS = Kinds()
KINDS.add_objects(
    BlockAllocator, BlockPool, BlockTable, DecodeCost, KVCacheManager, LinearCost, ModelLimits, Offers, Outputs, Parts,
    PrefixUse, PromptBudget, Request, RequestChecks, RequestClock, RequestMetrics, RequestQueue,
    Scheduler, SchedulerStats, SingleTypeKVCacheManager, StepCost, StepPlanBuilder, StepTimes, StopConditions,
    *(kind for part in OF_PARTS for kind in part.objects),
)  # fmt: skip
KINDS.add_objects(*STAND_INS, given="_answers")
KINDS.messages += [
    BlockChange, EngineConfig, Histogram, KVCacheSpec, KVHolder, KVSource, Peer, RemoteRequest,
    SamplingParams, StepPlan,
    *(kind for part in OF_PARTS for kind in part.messages),
]  # fmt: skip
KINDS.rows += [kind for part in OF_PARTS for kind in part.rows]
KINDS.constants |= {str(state): state for state in State}
KINDS.constants |= {"nobody": NOBODY, "nobody listens": NOBODY_LISTENS, "unknown": unknown}
for _part in OF_PARTS:
    KINDS.constants |= _part.constants
KINDS.methods += [(StepTimes, "compute_s"), *(method for part in OF_PARTS for method in part.methods)]
KINDS.methods += [
    (told.kind, hook)
    for told in KINDS.objects
    if issubclass(told.kind, Part)
    for hook in HOOKS
    if overrides(told.kind, getattr(Part, hook))
]


# -- what a state leaves out -------------------------------------------------------------------------------

UNSAID = {key for part in OF_PARTS for key in part.unsaid}


def of_request(request: Request) -> dict[str, Any]:
    return {
        "tokens": Zeros(len(request.tokens)),
        "reply_to": "",
        "timeline": [],
        "news": [],
        "prompt_logprobs": None if request.prompt_logprobs is None else [None],
        "of": {name: kept for name, kept in request.of.items() if name not in UNSAID},
    }


CHANGES: dict[type, Callable[[Any], dict[str, Any]]] = {
    Scheduler: lambda _: {"journal": NOBODY_LISTENS},
    Request: of_request,
    BlockPool: lambda _: {"observers": []},
    PrefixUse: lambda _: {"hashes": [], "salt": ""},
    Outputs: lambda _: {"events": [], "_posted": {}},
}
for _part in OF_PARTS:
    CHANGES |= _part.changes


def plan_without_text(plan: StepPlan) -> StepPlan:
    drafts = {entry: [ORDINARY] * len(tokens) for entry, tokens in plan.drafts.items()}
    parts = {name: record.without_text() for name, record in plan.parts.items()}
    return msgspec.structs.replace(plan, added=[], blocks=[], masks=b"", drafts=drafts, parts=parts)


def remote_request_without_text(asked: RemoteRequest, vocab_size: int) -> RemoteRequest:
    """Return a request with its images, whose hashes are in the state."""
    plain = remote_without_text(asked, params_without_text(asked.params, vocab_size))
    return plain.asking(PromptImages.of(without_data(image) for image in images_in(asked)))


def stand_ins(vocab_size: int) -> dict[type, Any]:
    """Return what is written instead of objects of some classes."""
    taped = (TapedDrafter, DrafterWatch, TapedGrammar, TapedNames)
    found: dict[type, Any] = dict.fromkeys(taped, lambda part: part.replayed())
    for part in OF_PARTS:
        found |= part.stands_for
    return found | {
        StepPlan: plan_without_text,
        RemoteRequest: partial(remote_request_without_text, vocab_size=vocab_size),
        SamplingParams: partial(params_without_text, vocab_size=vocab_size),
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
