"""Speculative decoding in a real engine: texts, ends, log-probabilities and counts as without, whatever is drafted."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from engine.errors import ConfigError
from engine.offline.outputs import CompletionOutput
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.fake_drafter import WildDrafter, draft_always

OPTIONS = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
    "num_gpu_blocks_override": 128,
}
TEXTS = ["The quick brown fox the quick brown", "A cache a cache a", "What is the meaning of this? What is", "dog dog"]
SEEDED = {"temperature": 0.9, "seed": 3}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}, "number": {"type": "boolean"}},
          "required": ["name", "number"], "additionalProperties": False}  # fmt: skip
PARAMS = {
    "greedy": {},
    "seeded": SEEDED,
    "filtered": {**SEEDED, "top_p": 0.8, "top_k": 20},
    "penalties": {**SEEDED, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "least": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {2: 8.0}},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "bad words": {"bad_words": ["the", " a"]},
    "grammar": {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 60},
    "stop": {"stop": ["e", "th"], "min_tokens": 3},
}


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[CompletionOutput]]:
    with LLM(folder, **OPTIONS) as llm:
        return {name: run(llm, name) for name in PARAMS}


@pytest.fixture
def wild(monkeypatch) -> WildDrafter:
    """Takes the place of prompt lookup, and drafts wherever it may."""
    drafter = WildDrafter()
    monkeypatch.setattr("engine.parts.speculation.make.NgramDrafter", lambda shortest, longest: drafter)
    draft_always(monkeypatch)
    return drafter


def run(llm: LLM, name: str) -> list[CompletionOutput]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **PARAMS[name]})
    return [result.outputs[0] for result in llm.generate(TEXTS, params, use_tqdm=False)]


def check(outputs: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    for output, right in zip(outputs, expected, strict=True):
        assert (output.token_ids, output.text) == (right.token_ids, right.text)
        assert (output.finish_reason, output.stop_reason) == (right.finish_reason, right.stop_reason)
        for logprob, same in zip(output.logprobs or [], right.logprobs or [], strict=True):
            assert [(token, e.rank) for token, e in logprob.items()] == [(token, e.rank) for token, e in same.items()]
            assert [e.logprob for e in logprob.values()] == pytest.approx([e.logprob for e in same.values()], abs=1e-4)


@pytest.mark.slow
def test_over_pipeline_stages_the_texts_are_the_same_with_grammars_and_with_accepted_and_rejected_drafts(
    folder, expected, wild
):
    with LLM(folder, pipeline_parallel_size=2, **OPTIONS) as llm:
        for name, right in expected.items():
            check(run(llm, name), right)
    with LLM(folder, pipeline_parallel_size=2, speculative_config={"method": "ngram"}, **OPTIONS) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        for name, right in expected.items():
            wild.know_texts([prompt + output.token_ids for prompt, output in zip(prompts, right, strict=True)])
            check(run(llm, name), right)
        stats = llm.stats().record(SpecDecodeStats)
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "overlap"])
def test_whatever_is_drafted_the_texts_are_those_without(folder, expected, wild, overlap):
    with LLM(folder, async_scheduling=overlap, speculative_config={"method": "ngram"}, **OPTIONS) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        for name, right in expected.items():
            wild.know_texts([prompt + output.token_ids for prompt, output in zip(prompts, right, strict=True)])
            check(run(llm, name), right)
        stats = llm.stats().record(SpecDecodeStats)
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculative",
    [
        pytest.param({"method": "ngram", "prompt_lookup_min": 1}, id="ngram"),
        pytest.param({"method": "suffix", "suffix_decoding_max_spec_factor": 4}, id="suffix", marks=pytest.mark.slow),
    ],
)
def test_on_a_gpu_drafts_are_verified_in_graphs_and_the_host_waits_for_no_kind_of_request(
    speculative, folder, expected, late, monkeypatch
):
    draft_always(monkeypatch)
    options = {**OPTIONS, "num_gpu_blocks_override": 28, "speculative_config": speculative}
    with LLM(folder, **options) as llm:
        for name, right in expected.items():
            check(run(llm, name), right)
        stats = llm.stats()
    assert stats.record(SpecDecodeStats).num_accepted_tokens > 0 < stats.preemptions
    assert len(late.replays) == stats.steps


@pytest.mark.slow
def test_prompt_lookup_gives_the_texts_without_in_fewer_steps(folder, expected, monkeypatch):
    draft_always(monkeypatch)
    with LLM(folder, speculative_config={"method": "ngram", "prompt_lookup_min": 1}, **OPTIONS) as llm:
        for name, right in expected.items():
            check(run(llm, name), right)
        stats = llm.stats()
        assert stats.record(SpecDecodeStats).num_accepted_tokens > 0
        assert stats.steps < stats.generation_tokens / 4


def test_suffix_decoding_gives_the_texts_without_and_learns_from_them(folder, expected, monkeypatch):
    draft_always(monkeypatch)
    with LLM(folder, speculative_config={"method": "suffix", "suffix_decoding_max_spec_factor": 4}, **OPTIONS) as llm:
        steps = []
        for _ in range(2):
            before = llm.stats().steps
            for name, right in expected.items():
                check(run(llm, name), right)
            steps.append(llm.stats().steps - before)
        assert steps[1] < steps[0] / 2, "the second time all is known"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_two_ranks_verify_the_same_drafts_of_the_scheduler(folder, expected, method, monkeypatch):
    draft_always(monkeypatch)
    with LLM(folder, tensor_parallel_size=2, speculative_config={"method": method}, **OPTIONS) as llm:
        for name, right in expected.items():
            check(run(llm, name), right)
        assert llm.stats().record(SpecDecodeStats).num_accepted_tokens > 0


def test_preempted_requests_go_on_with_drafts(folder, expected, wild):
    with LLM(folder, speculative_config={"method": "ngram"}, **{**OPTIONS, "num_gpu_blocks_override": 16}) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        wild.know_texts([prompt + right.token_ids for prompt, right in zip(prompts, expected["seeded"], strict=True)])
        check(run(llm, "seeded"), expected["seeded"])
        assert llm.stats().preemptions > 0 < llm.stats().record(SpecDecodeStats).num_accepted_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "speculative_config.method must be given"),
        (
            {"method": "guess"},
            "speculative_config.method must be one of ngram, suffix, draft_model, eagle3, mtp, got 'guess'",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 32"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "between 1 and 32"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "an integer"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "at most prompt_lookup_max"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "between 0 and 1, got 2"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "1"}, "a number"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "at least 2"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "at least 0"),
        ({"method": "ngram", "draft": 4}, "left out; the known keys are method, model, num_speculative_tokens"),
    ],
)
def test_options_that_there_are_not_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message) as refused:
        LLM("pocket", speculative_config=options)
    assert "\n" not in str(refused.value)
