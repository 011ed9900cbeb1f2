"""What all sequences of one model share in an ingress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deployments.billing.hourly_usage import HourlyUsage
from deployments.billing.prices import FREE, Prices
from deployments.frontend.admission import Admission
from deployments.frontend.inboxes import Inboxes
from deployments.frontend.observers import Observe, ObserveGeneration
from deployments.observability.stats import ModelStats
from deployments.observability.timeline import RequestTimelines
from deployments.replicas.pools import EngineClient
from engine.text.detokenizer import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceContext:
    model: str
    tokenizer: TokenBytes
    channel: Inboxes
    pool: EngineClient
    admission: Admission
    stats: ModelStats
    timelines: RequestTimelines
    max_replays: int
    """Maximum number of times that a sequence resumes in another engine."""
    max_model_len: float = math.inf
    """Maximum number of tokens of a prompt and its answer."""
    observers: tuple[Observe, ...] = ()
    """In the order in which they hear of a sequence; its metrics are the last."""
    generation_observers: tuple[ObserveGeneration, ...] = ()
    """In the order in which a request enters their blocks."""
    prices: Prices = FREE
    hourly: HourlyUsage = field(default_factory=HourlyUsage)
