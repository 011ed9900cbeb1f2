import math

import msgspec
import pytest

from engine.errors import InvalidParameter
from engine.wire.part_record import encoded
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams

NAN = float("nan")
INFINITY = float("inf")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"n": MAX_N},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"temperature": 5.0},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 1},
        {"top_k": 10**9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 10.0},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"stop": ["a"] * MAX_STOP_STRINGS},
        {"stop_token_ids": [0]},
        {"allowed_token_ids": [0]},
        {"logit_bias": {3: -100.0, 4: 100.0}},
    ],
    ids=str,
)
def test_values_at_the_edge_of_their_range_are_taken(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, f"n must be between 1 and {MAX_N}, got 0"),
        ({"n": MAX_N + 1}, f"n must be between 1 and {MAX_N}, got {MAX_N + 1}"),
        ({"temperature": -0.1}, "temperature must be a finite number, 0 or above, got -0.1"),
        ({"temperature": float("inf")}, "temperature must be a finite number, 0 or above, got inf"),
        ({"temperature": NAN}, "temperature must be a finite number, 0 or above, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"top_p": NAN}, "top_p must be above 0 and at most 1, got nan"),
        ({"top_k": -2}, "top_k must be -1 or 0 (no limit), or at least 1, got -2"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1, got -0.1"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1, got 1.1"),
        ({"seed": 2**63}, f"seed must be a 64-bit integer, got {2**63}"),
        ({"seed": -(2**63) - 1}, f"seed must be a 64-bit integer, got {-(2**63) - 1}"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be between -2 and 2, got -2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0, got 0.0"),
        ({"repetition_penalty": INFINITY}, "repetition_penalty must be a finite number above 0, got inf"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens must be at most max_tokens (5), got 6"),
        ({"logprobs": -1}, f"logprobs must be between 0 and {MAX_LOGPROBS}, got -1"),
        ({"logprobs": MAX_LOGPROBS + 1}, f"logprobs must be between 0 and {MAX_LOGPROBS}, got {MAX_LOGPROBS + 1}"),
        ({"prompt_logprobs": 21}, f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}, got 21"),
        ({"stop": ["a" * 1001]}, "stop must be strings of at most 1000 characters, got ['a"),
        ({"stop": ["a"] * 17}, f"stop must be at most {MAX_STOP_STRINGS} strings, got ['a', "),
        ({"stop": ["a", ""]}, "stop must be a list of non-empty strings, got ['a', '']"),
        ({"bad_words": [""]}, "bad_words must be a list of non-empty strings, got ['']"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids, 0 or above, got [-1]"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be a list of at least one id, got []"),
        ({"logit_bias": {3: 101.0}}, "logit_bias[3] must be between -100 and 100, got 101.0"),
        ({"logit_bias": {3: NAN}}, "logit_bias[3] must be between -100 and 100, got nan"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_name_value_and_limit(fields, message):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(message)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias must be a token id below 10, got 10"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be a token id below 10, got -1"),
        ({"allowed_token_ids": [3, 12]}, "allowed_token_ids must be a token id below 10, got 12"),
        ({"stop_token_ids": [3, 10]}, "stop_token_ids must be a token id below 10, got 10"),
    ],
    ids=str,
)
def test_token_ids_that_the_model_lacks_are_refused(fields, message):
    params = SamplingParams(**fields)
    with pytest.raises(InvalidParameter) as caught:
        params.check_vocabulary(10)
    assert str(caught.value) == message


def test_token_ids_that_the_model_has_are_taken():
    params = SamplingParams(logit_bias={0: 1.0, 9: -1.0}, allowed_token_ids=[0, 9], stop_token_ids=[0, 9])
    params.check_vocabulary(10)


def test_zero_temperature_is_greedy_and_nothing_else_is():
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=math.ulp(0.0)).greedy


def test_every_field_survives_a_message():
    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=-(2**63),
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: -100.0},
        allowed_token_ids=[1, 2],
        bad_words=["no"],
        bad_words_token_ids=[[1, 2], [3]],
        stop=["\n\n"],
        stop_token_ids=[7],
        ignore_eos=True,
        max_tokens=None,
        min_tokens=3,
        logprobs=2,
        prompt_logprobs=0,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        structured_outputs=StructuredOutputsParams(json={"enum": [1, None, {"a": []}]}, field="tools"),
        extra_args=encoded(ThinkingBudget(tokens=4, close=9, open=8)),
    )
    defaults = msgspec.structs.asdict(SamplingParams())
    assert all(value != defaults[name] for name, value in msgspec.structs.asdict(params).items())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_defaults_take_no_room_in_a_message():
    assert len(msgspec.msgpack.encode(SamplingParams())) <= 3  # a map of no fields


def test_a_message_is_checked_like_a_constructor():
    message = msgspec.msgpack.encode({"temperature": -3.0})
    with pytest.raises(InvalidParameter, match="temperature must be a finite number"):
        msgspec.msgpack.decode(message, type=SamplingParams)


def test_parameters_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5
