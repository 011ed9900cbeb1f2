"""`manta.SamplingParams`, which takes the arguments of vLLM's."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameter, RequestError
from engine.offline.sampling_params import FIELDS, TABLE, SamplingParams
from engine.wire import sampling_params as wire

VLLM = (  # in the order of vLLM's class, and of older ones that are still copied
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids "
    "ignore_eos max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids flat_logprobs detokenize "
    "skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval "
    "skip_clone output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args "
    "routed_experts_prompt_start bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection "
    "best_of use_beam_search length_penalty early_stopping logits_processors guided_decoding truncate_prompt_tokens "
    "watermarking prompt_logprob_token_ids prompt_logprob_start trace_decode_token_ids"
)


def test_every_field_of_vllm_is_ours_or_in_the_table_once():
    assert sorted([*FIELDS, *(row.name for row in TABLE)]) == sorted(VLLM.split())
    assert [name for name in VLLM.split() if name in FIELDS] == FIELDS, "positional arguments mean the same"


def test_engines_get_what_was_asked_for():
    assert SamplingParams().for_engine() == wire.SamplingParams()
    assert SamplingParams(2, temperature=0, stop="x").for_engine() == wire.SamplingParams(
        n=2, temperature=0, stop=["x"]
    )
    assert SamplingParams(stop=["x", "y"], max_tokens=None).for_engine().max_tokens is None
    assert SamplingParams(temperature=3.5, bad_words=None, skip_clone=None).for_engine().temperature == 3.5


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["x"])
    clone = params.clone()
    clone.stop.append("y")
    assert (params.stop, clone.stop) == (["x"], ["x", "y"])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_field_that_is_not_ours_is_ignored_with_a_reason_or_refused_by_name(row, caplog):
    for value in row.neutral:
        assert SamplingParams(**{row.name: value}) == SamplingParams()
    assert not caplog.messages
    if row.ignored:
        SamplingParams(**{row.name: "value"})
        assert caplog.messages == [f"{row.name} of SamplingParams is ignored: {row.note}"]
    else:
        with pytest.raises(RequestError, match=f"^{row.name} of SamplingParams is not supported: "):
            SamplingParams(**{row.name: "value"})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"temprature": 0.5}, "SamplingParams has no argument 'temprature'; it has n, presence_penalty"),
        ({"top_p": 2.0}, "top_p must be above 0 and at most 1, got 2.0"),
        ({"stop": "x", "detokenize": False}, "stop must be left out with detokenize=False, got 'x'"),
        ({"max_tokens": "5"}, "SamplingParams: Expected `int | null`, got `str` - at `$.max_tokens`"),
    ],
)
def test_a_field_that_is_unknown_or_out_of_range_is_refused_when_it_is_given(given, error):
    with pytest.raises((RequestError, InvalidParameter)) as refused:
        SamplingParams(**given)
    assert str(refused.value).startswith(error)
