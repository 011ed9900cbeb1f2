"""Traces as a collector receives them over real HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai

from deployments.observability import tracing
from deployments.observability.timeline import SequenceTimeline
from deployments.observability.tracing import Tracing, TracingConfig, operation_of, phases
from engine.errors import ConfigError, Overloaded, StartupError
from engine.wire.parts.handoffs import HandoffTimes
from engine.wire.token_delta import ErrorInfo, RequestTimes
from tests.deployments.fake_api import fake_api, says
from tests.deployments.real_api import real_api, real_api_with_prefill
from tests.models import make_model
from tests.otlp_receiver import OtlpReceiver
from tests.scenarios import run

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def all_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 60.0)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


def traceparent(*, sampled: bool) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{'01' if sampled else '00'}"}


def test_a_request_is_one_trace_from_the_clients_span_down_to_the_phases_in_the_engine(receiver, tmp_path):
    async def scenario() -> None:
        tracing = Tracing(TracingConfig(otlp_endpoint=receiver.endpoint))
        async with real_api(make_model(tmp_path, "llama", tokenizer=True), tracing) as api:
            await api.complete(prompt=[5, 6, 7], max_tokens=4, headers=traceparent(sampled=True))
        tracing.close()

    run(scenario())
    assert {span.trace_id for span in receiver.spans} == {TRACE_ID}
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"POST /v1/completions", "text_completion tiny", "queue", "prefill", "decode"}
    ingress, sequence = spans["POST /v1/completions"], spans["text_completion tiny"]
    assert (ingress.parent_id, sequence.parent_id) == (PARENT_ID, ingress.span_id)
    assert ingress.attributes["http.route"] == "/v1/completions"
    assert ingress.attributes["http.response.status_code"] == 200
    expected = {
        gen_ai.GEN_AI_OPERATION_NAME: "text_completion",
        gen_ai.GEN_AI_PROVIDER_NAME: "manta",
        gen_ai.GEN_AI_REQUEST_MODEL: "tiny",
        gen_ai.GEN_AI_RESPONSE_MODEL: "tiny",
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: 3,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 0,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: 4,
    }
    assert {name: sequence.attributes[name] for name in expected} == expected
    assert sequence.attributes["manta.usage.compute_seconds"] > 0 < sequence.attributes["manta.usage.kv_gib_seconds"]
    assert sequence.attributes["manta.usage.wasted_seconds"] == 0 and "manta.usage.cost" not in sequence.attributes
    assert sequence.attributes[gen_ai.GEN_AI_RESPONSE_ID].startswith("cmpl-")
    assert sequence.attributes[gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] > 0
    queue, prefill, decode = phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_id for span in phases} == {sequence.span_id}
    assert ingress.start <= sequence.start <= queue.start
    assert (queue.end, prefill.end) == (prefill.start, decode.start)
    assert all(span.start <= span.end for span in receiver.spans)
    assert decode.end <= sequence.end <= ingress.end


def test_a_prompt_that_another_engine_computes_has_a_handoff_in_its_trace(receiver, tmp_path):
    async def scenario() -> None:
        tracing = Tracing(TracingConfig(otlp_endpoint=receiver.endpoint))
        async with real_api_with_prefill(make_model(tmp_path, "llama", tokenizer=True), tracing) as api:
            await api.complete(prompt=list(range(5, 45)), max_tokens=4)
        tracing.close()

    run(scenario())
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"POST /v1/completions", "text_completion tiny", "queue", "prefill", "handoff", "decode"}
    prefill, handoff = spans["prefill"], spans["handoff"]
    assert handoff.parent_id == spans["text_completion tiny"].span_id
    assert prefill.start <= handoff.start < handoff.end <= prefill.end == spans["decode"].start


def test_every_sequence_of_a_request_has_a_span_of_its_own(receiver):
    async def scenario() -> None:
        tracing = Tracing(TracingConfig(otlp_endpoint=receiver.endpoint))
        async with fake_api(says("abc"), tracing=tracing) as api:
            await api.post("completions", prompt=["a", "b"], n=2)
        tracing.close()

    run(scenario())
    names = [span.name for span in receiver.spans]
    assert (names.count("POST /v1/completions"), names.count("text_completion fake")) == (1, 4)
    found = [span for span in receiver.spans if span.name == "text_completion fake"]
    assert len({span.attributes["manta.sequence.id"] for span in found}) == 4
    assert len({span.attributes["gen_ai.response.id"] for span in found}) == 1


def test_a_failed_request_is_marked_as_failed(receiver):
    async def scenario() -> None:
        tracing = Tracing(TracingConfig(otlp_endpoint=receiver.endpoint))
        async with fake_api(tracing=tracing) as api:
            api.engine.refusal = ErrorInfo.of(Overloaded("the queue is full"))
            assert (await api.post("completions", prompt="a")).status_code == 429
        tracing.close()

    run(scenario())
    spans = {span.name: span for span in receiver.spans}
    sequence = spans["text_completion fake"]
    assert sequence.failed
    assert sequence.attributes["error.type"] == "overloaded"
    assert sequence.attributes["gen_ai.response.finish_reasons"].values[0].string_value == "error"
    assert spans["POST /v1/completions"].attributes["http.response.status_code"] == 429


@pytest.mark.parametrize(
    ("ratio", "headers", "traced"), [(0, {}, 0), (1, {}, 3), (0, {"sampled": True}, 1), (1, {"sampled": False}, 0)]
)
def test_a_client_that_sends_a_traceparent_decides_and_else_the_ratio_does(receiver, ratio, headers, traced):
    async def scenario() -> None:
        tracing = Tracing(TracingConfig(otlp_endpoint=receiver.endpoint, sampling_ratio=ratio))
        async with fake_api(says("a"), tracing=tracing) as api:
            for _ in range(traced or 3):
                given = traceparent(**headers) if headers else {}
                await api.client.post("/v1/completions", json={"prompt": "a"}, headers=given)
        tracing.close()

    run(scenario())
    assert len([span for span in receiver.spans if span.name == "POST /v1/completions"]) == traced


def test_variables_of_opentelemetry_say_what_the_configuration_does_not(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint.removesuffix("/v1/traces"))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")

    async def scenario(config: TracingConfig) -> None:
        tracing = Tracing(config)
        assert tracing._provider.resource.attributes["service.name"] == "mine"
        async with fake_api(says("a"), tracing=tracing) as api:
            await api.post("completions", prompt="a")
        tracing.close()

    run(scenario(TracingConfig()))
    assert not receiver.spans
    run(scenario(TracingConfig(sampling_ratio=1.0)))
    assert "POST /v1/completions" in {span.name for span in receiver.spans}


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/llm/v1/chat/completions", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/messages", "chat"),
        ("/v1/responses", "chat"),
        ("/v1/embeddings", "embeddings"),
        ("/rerank", "rerank"),
    ],
)
def test_an_operation_has_the_name_of_the_conventions(path, operation):
    assert operation_of(path) == operation


async def test_requests_are_served_though_no_collector_listens(receiver, monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    receiver.close()
    traces = Tracing(TracingConfig(otlp_endpoint=receiver.endpoint))
    async with fake_api(says("a"), tracing=traces) as api:
        assert (await api.post("completions", prompt="a")).status_code == 200
    traces.close()


def test_a_handoff_lies_inside_the_prefill_it_is_part_of():
    times = RequestTimes(scheduled_s=1.0, first_token_s=4.0, finished_s=4.0)
    second = 10**9
    ended = SequenceTimeline(
        request_id="a", model="m", prompt_tokens=1, arrived_at=100.0, first_token_s=5.0, seconds=10.0
    )
    handoffs = [HandoffTimes(1.1, 1.2), HandoffTimes(1.5, 3.5)]  # the first one failed
    found = phases(ended, times, handoffs, 100 * second)
    in_s = {name: (start / second, end / second) for name, (start, end) in found.items()}
    assert in_s == {"queue": (100, 102), "prefill": (102, 105), "handoff": (102.5, 104.5), "decode": (105, 110)}


def test_without_the_extra_a_server_with_tracing_does_not_start(monkeypatch):
    monkeypatch.setitem(sys.modules, tracing.PACKAGE, None)  # as if it were not installed
    with pytest.raises(StartupError, match=r"pip install 'manta-serve\[otel\]'"):
        Tracing(TracingConfig(otlp_endpoint="http://127.0.0.1:1/v1/traces"))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"otlp_endpoint": "collector:4317"}, "tracing.otlp_endpoint"),
        ({"otlp_endpoint": "http://a", "sampling_ratio": 1.5}, "tracing.sampling_ratio"),
    ],
)
def test_a_bad_value_is_refused_by_its_key(fields, key):
    with pytest.raises(ConfigError, match=key):
        TracingConfig(**fields)
