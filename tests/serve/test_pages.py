"""Requests of the pages, as they are written, to one `manta serve` of the bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import block, run
from tests.serve.serve_run import ServeRun

pytestmark = [pytest.mark.serve, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def server(folder) -> Iterator[ServeRun]:
    """The bundled model, under the names that pages use. The folder is also its home: another model may be in ours."""
    models = [{"name": "default", "aliases": ["pocket", "qwen3"], "model": "pocket"}]
    with ServeRun(folder, {"models": models}, manta=True, environment={"HOME": str(folder)}) as server:
        server.wait_until_healthy()
        yield server


def here(text: str, server: ServeRun) -> str:
    return re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", server.url, text)


@pytest.mark.parametrize("name", ["README.md", "k8s/README.md", "docs/responses.md"])
def test_a_request_is_answered(name, server, folder):
    text = block(name, "bash", with_="What is an ocean?")
    answer = json.loads(run(here(text[text.index("curl") :], server), folder))
    assert "choices" in answer or "output" in answer


def test_an_answer_is_verified(server, folder):
    text = block("docs/determinism.md", "bash", with_="manta verify")
    assert run(here(text, server), folder, HOME=str(folder)).startswith("equal: tokens and log-probabilities")


def test_a_stream_is_resumed_from_the_event_that_its_client_had(server, folder):
    text = here(block("docs/idempotency.md", "bash", with_="Last-Event-ID"), server)
    first, _, rest = text.partition("# id: ")
    events = re.findall(r"^id: (\S+)$", run(first, folder), re.MULTILINE)
    resume = rest[rest.index("curl") :]
    shown = re.search(r"Last-Event-ID: (\S+)'", resume)
    assert shown is not None
    resume = resume.replace(shown[1], events[0]).replace(shown[1].partition(":")[0], events[0].partition(":")[0])
    assert re.findall(r"^id: (\S+)$", run(resume, folder), re.MULTILINE) == events[1:]


def test_a_batch_is_answered(server, folder):
    text = here(block("docs/batches.md", "bash", with_="BATCH_ID"), server)
    script = re.split(r"^(?=curl)", text, flags=re.MULTILINE)
    upload, create, poll, fetch = script[0] + script[1], *script[2:]
    file = json.loads(run(upload, folder))["id"]
    batch = json.loads(run(create.replace("file-...", file), folder))
    deadline = time.monotonic() + 120
    while batch["status"] != "completed":
        assert time.monotonic() < deadline and batch["status"] in ("validating", "in_progress", "finalizing"), batch
        batch = json.loads(run(poll.replace("BATCH_ID", batch["id"]), folder))
    answers = run(fetch.replace("OUTPUT_FILE_ID", batch["output_file_id"]), folder).splitlines()
    assert {json.loads(answer)["custom_id"] for answer in answers} == {"a", "b"}


def test_anthropics_client_is_answered(server):
    program = here(block("docs/anthropic.md", "python", with_="messages.create"), server)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_configuration_is_deployed_again(server, folder):
    command = block("docs/operations.md", "bash", with_="127.0.0.1:8265")
    dashboard = server.dashboard()
    run(command.replace("http://127.0.0.1:8265", dashboard), folder)
