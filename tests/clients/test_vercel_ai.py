"""Vercel's AI SDK, through its provider for compatible servers and those for OpenAI's and Anthropic's own APIs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.answers import CITY
from tests.clients.weather import WEATHER

SCRIPT = Path(__file__).with_name("vercel_ai.mjs")
MODULES = Path(os.environ.get("NPM_BIN", "build/clients/node_modules/.bin")).resolve().parent
CALL = ["get_weather", {"city": "Paris"}]


@pytest.fixture(scope="module")
def received(server):
    """What the script received through a provider."""
    known: dict[str, Any] = {}

    def of(provider: str) -> Any:
        if provider not in known:
            command = ["node", SCRIPT, server, provider]
            environment = {"PATH": os.environ["PATH"], "NODE_MODULES": str(MODULES)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            known[provider] = json.loads(done.stdout)
        return known[provider]

    return of


@pytest.fixture(params=["compatible", "chat", "responses", "messages"])
def both(request, received):
    """What was received whole, and what as a stream."""
    answers = received(request.param)
    return answers["whole"], answers["streamed"]


def test_texts_and_their_usage(both):
    for got in both:
        assert got["hello"]["text"] == "I heard: hello"
        usage = got["hello"]["usage"]
        assert usage["inputTokens"] > usage["outputTokens"] > 0
        assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"]
    whole, streamed = both
    assert whole["hello"]["warnings"] == []
    assert whole["hello"]["usage"] == streamed["hello"]["usage"]
    assert len(streamed["hello"]["deltas"]) > 1
    assert "".join(streamed["hello"]["deltas"]) == whole["hello"]["text"]


def test_steps_of_an_agent(both):
    for got in both:
        first, second = got["agent"]["steps"]
        assert first == {"text": "", "calls": [CALL], "results": [WEATHER], "finish": "tool-calls"}
        assert (second["text"], second["finish"]) == (f"The tool said: {WEATHER}", "stop")


def test_a_call_that_is_required(both):
    for got in both:
        (step,) = got["required"]["steps"]
        assert (step["calls"], step["finish"]) == ([CALL], "tool-calls")


def test_an_object_of_a_schema(both):
    assert [got["object"] for got in both] == [CITY, CITY]


def test_refused_requests_are_the_sdks_own_errors_with_our_message(both):
    for got in both:
        for error, status, word in ((got["unknown"], 404, "other"), (got["invalid"], 400, "top_p")):
            assert (error["isCallError"], error["statusCode"], error["isRetryable"]) == (True, status, False)
            assert word in error["message"]


def test_embeddings(received):
    answer = received("compatible")["embeddings"]
    assert [len(vector) for vector in answer["embeddings"]] == [4, 4]
    assert answer["usage"]["tokens"] > 0
