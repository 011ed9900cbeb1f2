"""Servers that share a folder of batches, and are killed while they work on one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import openai
import pytest

from tests.deployments.openai.batches.batches import ENDED, jsonl, line
from tests.served_app import served_app

pytestmark = pytest.mark.slow
NUM_LINES = 120


@contextmanager
def server(folder: Path) -> Iterator[tuple[Popen[str], openai.OpenAI]]:
    """A process with the API, and a client of it."""
    with (
        served_app("tests.deployments.openai.batches.server", str(folder)) as (process, url),
        openai.OpenAI(api_key="x", base_url=f"{url}/v1") as client,
    ):
        yield process, client


def wait_for_answers(client: openai.OpenAI, batch_id: str, count: int) -> None:
    deadline = time.monotonic() + 180
    while (batch := client.batches.retrieve(batch_id)).request_counts.completed < count:
        assert time.monotonic() < deadline and batch.status not in ENDED
        time.sleep(0.02)


def test_each_line_is_answered_once_although_one_server_after_the_other_is_killed(tmp_path):
    lines = [line(f"line {i}", prompt="ab" * (i % 7 + 1), max_tokens=20) for i in range(NUM_LINES - 1)]
    content = jsonl(*lines, line("wrong", top_p=7))
    with server(tmp_path) as (first, first_client), server(tmp_path) as (second, second_client):
        file = first_client.files.create(file=("in.jsonl", content), purpose="batch")
        batch_id = second_client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        ).id
        output = tmp_path / "work" / batch_id / "output.jsonl"
        wait_for_answers(first_client, batch_id, 10)
        second.kill()
        before = output.read_bytes()
        wait_for_answers(first_client, batch_id, before.count(b"\n") + 10)
        first.kill()
        assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
        before = output.read_bytes()
    with server(tmp_path) as (_, client):
        while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
            time.sleep(0.05)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"completed": NUM_LINES - 1, "failed": 1, "total": NUM_LINES}
        found = client.files.content(batch.output_file_id).content
        assert found.startswith(before[: before.rfind(b"\n") + 1])
        answers = [json.loads(text) for text in found.splitlines()]
        assert sorted(answer["custom_id"] for answer in answers) == sorted(line["custom_id"] for line in lines)
        texts = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
        for i, request in enumerate(lines):
            assert texts[f"line {i}"] == (request["body"]["prompt"] * 20)[: len(texts[f"line {i}"])] != ""
        (wrong,) = client.files.content(batch.error_file_id).text.splitlines()
        assert json.loads(wrong)["custom_id"] == "wrong"
