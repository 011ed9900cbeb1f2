"""Answers of a server that computes several at once, computed again alone."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.lab.verify import _engine_options, differences
from cluster.model_info import model_info
from engine.config import EngineConfig
from engine.text.chat_tokenizer import ChatTokenizer
from tests.deployments.real_api import real_api
from tests.models import make_model

REQUEST = {"prompt": [5, 7, 9, 11], "max_tokens": 6, "seed": 3, "n": 2, "logprobs": 0, "return_token_ids": True,
           "ignore_eos": True}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("verify"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def answers(model) -> tuple[dict[str, Any], dict[str, Any]]:
    """To REQUEST and to CHAT, from a server that had other requests, too."""
    info = model_info(ModelSection(name=model.name, model=str(model)), IngressSection())

    async def ask() -> tuple[dict[str, Any], dict[str, Any]]:
        async with real_api(model, info=info) as api:
            sent = [("completions", REQUEST), ("completions", {**REQUEST, "seed": 5}), ("chat/completions", CHAT)]
            got = await asyncio.gather(*(api.client.post(f"/v1/{route}", json=body) for route, body in sent))
            assert {answer.status_code for answer in got} == {200}
            return got[0].json(), got[2].json()

    return asyncio.run(asyncio.wait_for(ask(), 120))


def verify(model: Path, folder: Path, answer: object, request: object) -> tuple[int, str]:
    """Exit code and output of the command."""
    names = [str(folder / name) for name in ("answer.json", "request.json")]
    for name, value in zip(names, (answer, request), strict=True):
        Path(name).write_text(json.dumps(value))
    result = CliRunner().invoke(app, ["verify", *names, "--model", str(model)])
    return result.exit_code, result.output


def test_tokens_and_log_probabilities_that_were_computed_in_a_batch_are_found_equal(model, answers, tmp_path):
    code, output = verify(model, tmp_path, answers[0], REQUEST)
    assert code == 0 and output.startswith("equal: tokens and log-probabilities, and all other fields; not compared: ")


def test_a_chat_of_which_only_the_text_is_known_is_found_equal(model, answers, tmp_path):
    code, output = verify(model, tmp_path, answers[1], CHAT)
    assert code == 0 and output.startswith("equal: text, and all other fields; not compared: id, created, ")


def test_the_first_position_that_differs_is_told_with_both_log_probabilities(model, answers, tmp_path):
    answer = copy.deepcopy(answers[0])
    values = answer["choices"][1]["logprobs"]["token_logprobs"]
    right, values[4] = values[4], -1.5
    code, output = verify(model, tmp_path, answer, REQUEST)
    assert code == 1 and output.startswith("choice 1, position 4: ")
    assert "-1.5" in output and repr(right) in output and "\n" not in output.strip()


def test_tokens_without_log_probabilities_are_compared_by_their_ids(model, answers, tmp_path):
    answer = copy.deepcopy(answers[0])
    for choice in answer["choices"]:
        choice["logprobs"] = None
    request = {**REQUEST, "logprobs": None, "echo": True}  # of which log-probabilities would begin with the prompt's
    answer["choices"][0]["token_ids"][2] += 1
    code, output = verify(model, tmp_path, answer, request)
    assert code == 1 and output.startswith("choice 0, position 2: ")
    assert f"({answer['choices'][0]['token_ids'][2]})" in output


def test_another_text_is_shown_from_where_it_differs(model, answers, tmp_path):
    answer = copy.deepcopy(answers[1])
    answer["choices"][0]["message"]["content"] += " and more"
    code, output = verify(model, tmp_path, answer, CHAT)
    assert code == 1 and output.startswith("choice 0: another message: ") and " and more" in output


def fields_of(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values in some JSON that are neither objects nor lists."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from fields_of(each, (*path, key))
    else:
        yield path


def test_a_change_of_any_field_is_found_save_of_those_that_are_named_as_not_compared(model, answers):
    tokenizer, answer = ChatTokenizer.from_folder(model), answers[0]
    assert differences(answer, answer, tokenizer) == []
    kept = set()
    for path in fields_of(answer):
        changed = copy.deepcopy(answer)
        *above, name = path
        inner = reduce(lambda value, key: value[key], above, changed)
        inner[name] = inner[name] + 1 if isinstance(inner[name], int | float) else f"{inner[name]} changed"
        if not differences(changed, answer, tokenizer):
            kept.add(path)
    details = "usage", "prompt_tokens_details"
    assert kept == {("id",), ("created",), *((*details, name) for name in answer["usage"]["prompt_tokens_details"])}


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"model": "larger"}, 'another model: "larger", computed again "'),
        ({"usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}}, "another usage: "),
        ({"choices": []}, "does not belong to the answer"),
        ({"usage": None}, "is not a full answer"),
    ],
)
def test_another_model_or_usage_is_no_equal_answer(model, answers, tmp_path, changed, difference):
    code, output = verify(model, tmp_path, {**answers[0], **changed}, REQUEST)
    assert code and difference in output


def test_a_server_with_another_model_is_told_and_nothing_is_computed(model, answers, tmp_path):
    parts = answers[0]["system_fingerprint"].split("_")
    parts[1], parts[3] = "00000000", "11111111"
    answer = {**answers[0], "system_fingerprint": "_".join(parts)}
    code, output = verify(model, tmp_path, answer, REQUEST)
    assert (code, output) == (2, "not computed: the server's system_fingerprint differs in weights, options\n")


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        ({**REQUEST, "seed": None}, "seed must be given, or temperature 0"),
        ({**REQUEST, "prompt": [5, 7, 9]}, "does not belong to the answer"),
        ({**REQUEST, "n": 1}, "does not belong to the answer"),
        ([], "is not a JSON object"),
    ],
)
def test_what_cannot_be_computed_again_is_no_difference(model, answers, tmp_path, request_body, reason):
    code, output = verify(model, tmp_path, answers[0], request_body)
    assert code == 2 and reason in output


def test_answers_of_engines_that_share_experts_with_strict_determinism_are_computed_by_one_engine():
    shared = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "all2all_backend": "alltoall",
    }
    section = ModelSection(name="mixture", model="mixture", engine=shared | {"determinism": "strict"})
    config = EngineConfig(**_engine_options(section))
    assert (config.determinism, config.num_ranks, config.data_parallel_size) == ("strict", 1, 1)
