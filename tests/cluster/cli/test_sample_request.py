"""The request that `manta serve` shows: a shell reads it as it stands, and the server answers it."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess

import httpx
import pytest

from cluster.cli.sample_request import REQUESTS, curl
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from engine.wire.parts.pooling import SupportedTasks
from tests.deployments.fake_api import FakeApi, fake_api, says

ADDRESS = "http://127.0.0.1:8000"


async def sent(api: FakeApi, command: str, key: str = "") -> httpx.Response:
    """Send what a shell makes of the command. key: value of the variable for it."""
    script = f'curl() {{ printf "%s\\0" "$@"; }}\n{command}'
    done = subprocess.run(
        ["bash", "-c", script], env={"MANTA_API_KEY": key}, capture_output=True, text=True, check=True
    )
    words = done.stdout.split("\0")[:-1]
    headers, body, url = {}, "", ""
    while words:
        match words.pop(0):
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "-d":
                body = words.pop(0)
            case word:
                url = word
    return await api.client.post(url.removeprefix(ADDRESS), headers=headers, content=body)


@pytest.mark.parametrize("task", REQUESTS)
async def test_a_model_of_every_task_answers_the_request_for_it(task):
    name = "it's-a/model"
    tasks = SupportedTasks(names=(task.replace("chat", "generate"),), embedding_size=4, labels=("a", "b", "c", "d"))
    async with fake_api(says("A large sea."), names=(name,), supported_tasks=tasks) as api:
        response = await sent(api, curl(ADDRESS, name, task, needs_key=False))
    assert response.status_code == 200, response.text


async def test_a_server_with_keys_answers_the_request_with_the_key_of_the_variable():
    auth = AuthConfig(api_keys=(key_line("alice", "sk-a"),))
    async with fake_api(says("A large sea."), auth=auth) as api:
        statuses = [
            (await sent(api, curl(ADDRESS, "fake", "chat", needs_key=needs_key), "sk-a")).status_code
            for needs_key in (True, auth.has_keys, AuthConfig().has_keys)
        ]
    assert statuses == [200, 200, 401]


async def test_a_model_is_asked_for_what_it_does():
    async with fake_api() as api:
        assert api.model.main_task == "chat"
        plain = copy.copy(api.model.tokenizer)
    plain.chat_template = None
    async with fake_api(text_model=plain) as api:
        assert api.model.main_task == "generate"
    async with fake_api(supported_tasks=SupportedTasks(names=("score",))) as api:
        assert api.model.main_task == "score"


@pytest.mark.parametrize("task", REQUESTS)
def test_the_lines_of_a_request_fit_80_columns(task):
    command = curl("https://127.0.0.1:8000", "Llama-3.1-8B-Instruct", task, needs_key=True)
    assert max(map(len, command.splitlines())) <= 80
    assert json.loads(shlex.split(command)[-1])["model"] == "Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("address", "unchecked"),
    [
        ("https://127.0.0.1:8000", True),
        ("https://[::1]:8000", True),
        ("https://llm.example.com:8000", False),
        ("http://127.0.0.1:8000", False),
    ],
)
def test_only_this_machine_s_certificate_is_not_checked(address, unchecked):
    words = shlex.split(curl(address, "m", "chat", needs_key=True))
    assert ("--insecure" in words) == unchecked
    assert f"{address}/v1/chat/completions" in words
