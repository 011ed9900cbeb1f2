"""OpenTelemetry traces of requests, sent by OTLP over HTTP. Needs the extra `otel`.

There is one trace per HTTP request. It contains the request itself (`POST /v1/completions`), and for each of its
sequences a span such as `chat llama` with `queue`, `prefill`, `handoff` (the part of prefill left to another engine)
and `decode`. Names and attributes follow OpenTelemetry's conventions for HTTP and for generative AI. Tracing does not
slow the engine: its deltas carry the times that it keeps anyway, and the spans are made from them here, afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.types import Scope

from deployments.observability.timeline import SequenceTimeline
from engine.errors import ConfigError, StartupError
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.handoffs import HandoffTimes
from engine.wire.token_delta import RequestTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

PACKAGE = "opentelemetry.exporter.otlp.proto.http"
SERVICE = "manta"  # gen_ai.provider.name, and service.name unless OTEL_SERVICE_NAME is set
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat",
              "/v1/embeddings": "embeddings"}  # fmt: skip
CLOSE_S = 2.0  # to send the remaining spans when the ingress ends


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Collector to which traces are sent, and fraction of requests that are traced."""

    otlp_endpoint: str | None = None
    """URL that takes traces by OTLP over HTTP, for instance http://collector:4318/v1/traces; None for
    OTEL_EXPORTER_OTLP_ENDPOINT and related variables in the environment of ingresses."""
    sampling_ratio: float | None = None
    """Fraction of requests to trace, unless a client's `traceparent` decides; None for OTEL_TRACES_SAMPLER, or all."""

    def __post_init__(self) -> None:
        endpoint = self.otlp_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError("tracing.otlp_endpoint", endpoint, "a URL that begins with http:// or https://")
        if self.sampling_ratio is not None and not 0 <= self.sampling_ratio <= 1:
            raise ConfigError("tracing.sampling_ratio", self.sampling_ratio, "from 0 to 1")

    def check_installed(self) -> None:
        """Raise StartupError if the packages of the extra are missing."""
        if not _installed(PACKAGE):
            raise StartupError(f"`tracing` needs {PACKAGE}; install it with: pip install 'manta-serve[otel]'")


class Tracing:
    """Creates spans and sends them in the background."""

    def __init__(self, config: TracingConfig, *, exporter: SpanExporter | None = None):
        """exporter: replaces the one for `config.otlp_endpoint`. Raises StartupError."""
        config.check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        named = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME wins
        self._provider = TracerProvider(
            sampler=None if config.sampling_ratio is None else ParentBasedTraceIdRatio(config.sampling_ratio),
            resource=Resource.create(dict(named.attributes)),
            shutdown_on_exit=False,
        )
        exporter = exporter or OTLPSpanExporter(endpoint=config.otlp_endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("manta")

    def start(self, scope: Scope, started_ns: int) -> RequestTrace | None:
        """Begin the trace of an HTTP request, or continue that of its `traceparent`. Returns None if it is not
        sampled."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        span = self._tracer.start_span(
            scope["method"],
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            start_time=started_ns,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "url.scheme": scope.get("scheme", "http"),
            },
        )
        return (
            RequestTrace(self._tracer, span, started_ns, scope["method"], operation_of(scope["path"]))
            if span.is_recording()
            else None
        )

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_S. (Without a collector `shutdown` would try for half a
        minute.)"""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSE_S)


class RequestTrace:
    def __init__(self, tracer: Tracer, span: Span, started_ns: int, method: str, operation: str):
        """operation: as from operation_of."""
        self._tracer, self._span, self._started_ns = tracer, span, started_ns
        self._method, self._operation = method, operation
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def sequence(
        self, ended: SequenceTimeline, times: RequestTimes | None, handoffs: Sequence[HandoffTimes] = ()
    ) -> None:
        """Add the spans of an ended sequence. times, handoffs: the engine's times, which came with the first token."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            f"{self._operation} {ended.model}",
            context=set_span_in_context(self._span),
            start_time=self._started_ns,
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": SERVICE,
                "gen_ai.request.model": ended.model,
                "gen_ai.response.model": ended.model,
                "gen_ai.response.id": ended.answer_id,
                "gen_ai.response.finish_reasons": [ended.reason or ""],
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
                "gen_ai.usage.output_tokens": ended.output_tokens,
                "manta.sequence.id": ended.request_id,
            },
        )
        if ended.costs:
            span.set_attributes({f"manta.usage.{name}": value for name, value in costs(ended).items()})
        if ended.first_token_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", ended.first_token_s)
        inside = set_span_in_context(span)
        for name, (start_ns, end_ns) in phases(ended, times, handoffs, self._started_ns).items():
            self._tracer.start_span(name, context=inside, start_time=start_ns).end(end_ns)
        if ended.reason == "error":
            self._fail(span, ended.error_type or "error")
        span.end(self._started_ns + _ns(ended.seconds))

    def end(self, route: str, status: int, ended_ns: int) -> None:
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._fail(self._span, str(status))
        self._span.end(ended_ns)

    def _fail(self, span: Span, kind: str) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR)


def costs(ended: SequenceTimeline) -> dict[str, float]:
    """Return what a sequence has cost. OpenTelemetry has no names for that."""
    cost = SequenceCost.total(ended.costs.values())
    found = {"compute_seconds": cost.compute_s, "wasted_seconds": cost.wasted_s, "kv_gib_seconds": cost.kv_gib_s}
    return found | {name: n for name, n in (("tier_gib_seconds", cost.tier_gib_s), ("cost", ended.price)) if n}


def operation_of(path: str) -> str:
    """Return gen_ai.operation.name for a path. Routes without a conventional name use the last part of their path."""
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        return "text_completion"
    return next((name for ending, name in OPERATIONS.items() if path.endswith(ending)), path.rpartition("/")[2])


def phases(
    ended: SequenceTimeline, times: RequestTimes | None, handoffs: Sequence[HandoffTimes], started_ns: int
) -> dict[str, tuple[int, int]]:
    """Return start and end of each phase that was reached, in ns since 1970.

    The engine's clock differs. The two clocks are aligned at the first token, whose message takes about a millisecond.
    """
    first_ns, ended_ns = started_ns + _ns(ended.first_token_s), started_ns + _ns(ended.seconds)
    if times is None:
        return {"queue": (started_ns, ended_ns)}
    scheduled_ns = first_ns - _ns(times.first_token_s - times.scheduled_s)
    found = {"queue": (min(started_ns, scheduled_ns), scheduled_ns), "prefill": (scheduled_ns, first_ns)}
    for handoff in handoffs:  # the last one counts
        arrived_ns = first_ns - _ns(times.first_token_s)
        found["handoff"] = (arrived_ns + _ns(handoff.start_s), arrived_ns + _ns(handoff.end_s))
    return {**found, "decode": (first_ns, ended_ns)}


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
