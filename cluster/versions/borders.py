"""The records that processes of two versions send each other, and that one version finds where another has left them.

Not those between the ranks of one engine, or between an engine and its replica: these are of one version.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from cluster.autoscaling.slo import PoolSettings
from cluster.versions.record_form import Forms, forms_of, name_of
from deployments.jobs.record import JobRecord
from deployments.observability.stats import IngressStats
from deployments.observability.telemetry import IngressUsage
from deployments.observability.timeline import IngressOverview, SequenceTimeline
from deployments.openai.batches.files import File
from deployments.openai.batches.records import Record
from deployments.openai.batches.store import BatchRecord
from deployments.openai.responses.store import StoredResponse
from deployments.parts.keys.managed_keys import ManagedKey, StoredTable
from deployments.parts.sessions.record import SessionTree
from deployments.parts.tape.choice_record import RecordedChoice, RouterTape
from deployments.parts.tape.questions import KeptTape, PoolTapes
from deployments.quotas.record import QuotaRecord
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.pools import ReplicaQuestion, ReplicaStatus
from deployments.replicas.scaling_report import ReplicaReport, ScalingChange
from deployments.routing.config import RouterOptions
from deployments.served_adapter import ServedAdapter
from engine.distributed.cluster_key import ClusterKey
from engine.kv_transfer.protocol.messages import Envelope
from engine.kv_transfer.transport.nixl import NixlDescription
from engine.kv_transfer.transport.tcp import TcpDescription
from engine.kv_transfer.transport.worker import HeldLayers
from engine.lora.messages import AdapterAnswer, AdapterLoad, AdapterLoaded, SequenceAdapter
from engine.parts.kv_check.messages import BlockCompared, BlockPair
from engine.parts.tape.engine_tape import EngineTape
from engine.parts.tape.file import TapeFile
from engine.parts.tape.shared_copy import CopyHead
from engine.wire.messages import Command, EngineUpdate
from engine.wire.part_record import PartRecord
from engine.wire.parts import stages, tape, thinking_budget  # noqa: F401  so that their kinds are below others
from engine.wire.parts.experts import ExpertAnswer, ExpertOrder
from engine.wire.parts.holds import HeldPrompts
from engine.wire.parts.images import ImageStep
from engine.wire.parts.kv_offload import TierMessage
from engine.wire.parts.states import StateStep
from engine.wire.token_delta import TokenBatch

BorderName = Literal["commands", "engines", "parts", "handoffs", "ingresses", "store", "tapes"]
BETWEEN_RANKS = (
    AdapterLoad, AdapterAnswer, SequenceAdapter, BlockCompared, BlockPair, ExpertOrder, ExpertAnswer, ImageStep,
    StateStep, TierMessage,
)  # fmt: skip
"""Records of parts that do not leave an engine."""
IN_JSON = frozenset({"StoredResponse", "StoredTable", "ManagedKey", "Record[File]", "BatchRecord"})
"""Names of the records that are stored as JSON; all others are in msgpack."""


@cache
def kinds_by_border() -> dict[BorderName, list[Any]]:
    """Return the kinds of records that cross each border:

    commands    to an engine and its replica, from ingresses, routers and other replicas
    engines     from an engine or its replica, to ingresses, routers and other replicas
    parts       what the two say to and of parts
    handoffs    between engines that hand KV over
    ingresses   between ingresses, in Ray's GCS, and in the options of Serve's deployments
    store       in the store, which outlives a cluster
    tapes       in files of tapes
    """
    parts = [kind for kind in _kinds_below(PartRecord) if not issubclass(kind, BETWEEN_RANKS)]
    return {
        "commands": [EncodedRequest, *_kinds_below(Command), *_kinds_below(ReplicaQuestion)],
        "engines": [
            TokenBatch, EngineUpdate, ReplicaStatus, ReplicaReport, AdapterLoaded, HeldPrompts, PoolTapes, KeptTape,
        ],
        "parts": parts,
        "handoffs": [Envelope, TcpDescription, NixlDescription, HeldLayers],
        "ingresses": [
            IngressStats, IngressOverview, IngressUsage, SequenceTimeline, ClusterKey, ServedAdapter, ScalingChange,
            RouterOptions, PoolSettings,
        ],
        "store": [
            JobRecord, QuotaRecord, SessionTree, StoredResponse, StoredTable, ManagedKey, Record[File], BatchRecord,
        ],
        "tapes": [TapeFile, EngineTape, CopyHead, RouterTape, RecordedChoice],
    }  # fmt: skip


def roots() -> list[str]:
    """Return the names of the records that cross a border by themselves."""
    return [name_of(kind) for kinds in kinds_by_border().values() for kind in kinds]


def forms() -> Forms:
    """Return the forms of all records that cross a border."""
    return forms_of(kind for kinds in kinds_by_border().values() for kind in kinds)


def _kinds_below(base: type) -> Iterator[type]:
    """Yield the classes that derive from one, by name, but not those that only others derive from. Only our own: tests
    have further ones."""
    package = __name__.removesuffix("cluster.versions.borders")
    found: list[type] = sorted(base.__subclasses__(), key=name_of)  # else in the order in which they were imported
    for kind in found:
        yield from _kinds_below(kind)
    ours = base.__module__.startswith((f"{package}engine.", f"{package}deployments."))
    if not found and ours:
        yield base
