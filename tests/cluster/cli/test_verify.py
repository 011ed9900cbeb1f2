"""Answers as a server gives them, here made by an engine that computes several at once, and computed again alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config import IngressSection, ModelSection
from cluster.model_info import model_info
from engine import LLM, SamplingParams
from tests.models import make_model

REQUEST = {"prompt": [5, 7, 9, 11], "max_tokens": 6, "seed": 3, "n": 2, "logprobs": 0, "return_token_ids": True,
           "ignore_eos": True}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("verify"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def answers(model) -> tuple[dict[str, Any], dict[str, Any]]:
    """To REQUEST and to CHAT."""
    params = SamplingParams(max_tokens=6, seed=3, n=2, logprobs=0, ignore_eos=True)
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(str(model), device="cpu", kv_cache_memory_gib=0.01, block_size=16) as llm:
        prompt = llm.tokenizer.apply_chat_template(CHAT["messages"])
        drawn, said = llm.generate([REQUEST["prompt"], prompt], [params, greedy], progress=False)
        choices = [
            {
                "index": output.index,
                "text": output.text,
                "logprobs": {
                    "tokens": [llm.tokenizer.token_text(token) for token in output.token_ids],
                    "token_logprobs": [entry.logprob for entry in output.logprobs or []],
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": output.token_ids,
            }
            for output in drawn.outputs
        ]
    message = {"role": "assistant", "content": said.outputs[0].text, "refusal": None}
    chat = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    fingerprint = model_info(ModelSection(name=model.name, model=str(model)), IngressSection()).fingerprint
    common = {"model": model.name, "system_fingerprint": fingerprint}
    return (
        {"object": "text_completion", "choices": choices, "usage": {"prompt_tokens": 4}, **common},
        {"object": "chat.completion", "choices": [chat], "usage": {"prompt_tokens": len(prompt)}, **common},
    )


def verify(model: Path, folder: Path, answer: object, request: object) -> tuple[int, str]:
    """Exit code and output of the command."""
    names = [str(folder / name) for name in ("answer.json", "request.json")]
    for name, value in zip(names, (answer, request), strict=True):
        Path(name).write_text(json.dumps(value))
    result = CliRunner().invoke(app, ["verify", *names, "--model", str(model)])
    return result.exit_code, result.output


def test_tokens_and_log_probabilities_that_were_computed_in_a_batch_are_found_equal(model, answers, tmp_path):
    assert verify(model, tmp_path, answers[0], REQUEST) == (0, "equal: tokens and log-probabilities\n")


def test_a_chat_of_which_only_the_text_is_known_is_found_equal(model, answers, tmp_path):
    assert verify(model, tmp_path, answers[1], CHAT) == (0, "equal: text\n")


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
        ({**REQUEST, "prompt": [5, 7, 9]}, "is not what was answered"),
        ({**REQUEST, "n": 1}, "is not what was answered"),
        ([], "is no JSON object"),
    ],
)
def test_what_cannot_be_computed_again_is_no_difference(model, answers, tmp_path, request_body, reason):
    code, output = verify(model, tmp_path, answers[0], request_body)
    assert code == 2 and reason in output
