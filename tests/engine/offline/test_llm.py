from __future__ import annotations

import pytest

import manta
from engine import LLM, SamplingParams
from engine.errors import ConfigError, InvalidParameter, ModelFolderError, PromptTooLong, RequestError
from engine.offline.outputs import RequestOutput
from engine.wire.part_record import encoded
from engine.wire.parts.thinking_budget import ThinkingBudget
from tests.models import EOS, make_model

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
OPTIONS = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_threads": 1}
TEXTS = ["The quick brown fox", "A cache", "What is the meaning of this word? It is", "dog", "user assistant system"]


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, num_gpu_blocks_override=128, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain_llm(folder):
    with LLM(folder, num_gpu_blocks_override=128, async_scheduling=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def small_llm(folder):
    """Too small for its batch, so that it preempts."""
    with LLM(folder, num_gpu_blocks_override=14, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def letters(llm) -> list[int]:
    """Tokens of ASCII letters and spaces: whatever is made of them is plain text."""
    texts = {token: llm.tokenizer.token_bytes(token) for token in range(500)}
    return [token for token, text in texts.items() if token > EOS and text.replace(b" ", b"a").isalpha()]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    assert llm.stats().blocks_used == llm.stats().running == llm.stats().waiting == 0
    llm._core.scheduler.check()


def generate(llm: LLM, prompts, params=None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def only(results: list[RequestOutput]):
    (result,) = results
    (output,) = result.outputs
    return output


def tokens_of(results: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for result in results for output in result.outputs]


# -- prompts and results ---------------------------------------------------------------------------------------


def test_text_and_its_token_ids_give_the_same(llm):
    params = SamplingParams(**GREEDY)
    text = generate(llm, TEXTS[0], params)
    ids = generate(llm, llm.tokenizer.encode(TEXTS[0]), params)
    assert (text[0].prompt, ids[0].prompt) == (TEXTS[0], None)
    assert text[0].prompt_token_ids == ids[0].prompt_token_ids == llm.tokenizer.encode(TEXTS[0])
    assert tokens_of(text) == tokens_of(ids)
    assert len(tokens_of(text)[0]) == 16


def test_text_is_what_the_tokens_decode_to(llm):
    output = only(generate(llm, TEXTS[0], SamplingParams(**GREEDY)))
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_results_come_in_the_order_of_the_prompts_whatever_ends_first(llm):
    prompts = TEXTS * 3  # more than run at once
    params = [SamplingParams(**{**GREEDY, "max_tokens": 1 + (7 * i) % 16}) for i in range(len(prompts))]
    results = generate(llm, prompts, params)
    assert [result.prompt for result in results] == prompts
    assert [len(tokens) for tokens in tokens_of(results)] == [p.max_tokens for p in params]
    for i, text in enumerate(TEXTS):
        alone = tokens_of(generate(llm, text, SamplingParams(**GREEDY)))[0]
        for j in range(i, len(prompts), len(TEXTS)):
            assert results[j].outputs[0].token_ids == alone[: params[j].max_tokens]


def test_one_params_for_all_or_one_for_each_and_no_other_number(llm):
    two = generate(llm, TEXTS[:2], SamplingParams(**{**GREEDY, "max_tokens": 3}))
    assert [len(tokens) for tokens in tokens_of(two)] == [3, 3]
    with pytest.raises(RequestError, match="sampling_params has 3 entries for 2 prompts"):
        generate(llm, TEXTS[:2], [SamplingParams()] * 3)


def test_without_params_an_answer_has_at_most_16_tokens(llm):
    assert 1 <= len(only(generate(llm, TEXTS[0])).token_ids) <= 16


def test_no_prompts_give_no_results(llm):
    assert generate(llm, []) == []


def test_a_mixture_of_text_and_token_lists(llm):
    results = generate(llm, [TEXTS[0], llm.tokenizer.encode(TEXTS[0])], SamplingParams(**GREEDY))
    assert tokens_of(results)[0] == tokens_of(results)[1]


def test_token_ids_and_texts_in_one_list_are_refused(llm):
    with pytest.raises(RequestError, match=r"prompts must be .* but 5 is a token id itself"):
        generate(llm, [5, TEXTS[0]])


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [(None, "None"), ([None], "None"), ([5, 6.5], "6.5"), ([[5, 6.5]], "6.5"), ([[5, None]], "None")],
)
def test_what_is_neither_a_text_nor_token_ids_is_refused_with_its_value(llm, prompts, shown):
    with pytest.raises(RequestError, match=f"prompts must be texts, lists of token ids.*({shown}|5 is a token id)"):
        generate(llm, prompts)
    assert not llm.stats().running


def test_a_dict_is_the_prompt_that_it_contains(llm):
    params, ids = SamplingParams(**GREEDY), llm.tokenizer.encode(TEXTS[0])
    text, both, tokens = (
        generate(llm, prompt, params)[0]
        for prompt in ({"prompt": TEXTS[0]}, {"prompt_token_ids": ids, "prompt": "A cache"}, {"prompt_token_ids": ids})
    )
    assert (text.prompt, both.prompt, tokens.prompt) == (TEXTS[0], "A cache", None)
    assert text.prompt_token_ids == both.prompt_token_ids == tokens.prompt_token_ids == ids
    assert tokens_of([text]) == tokens_of([both]) == tokens_of([tokens]) == tokens_of(generate(llm, TEXTS[0], params))


def test_a_prefix_is_shared_only_with_prompts_of_the_same_salt(llm):
    ids = list(range(150, 171))
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "b", "a")]
    assert [generate(llm, prompt)[0].num_cached_tokens for prompt in prompts] == [0, 0, 20]


def test_a_priority_needs_the_policy_and_one_entry_for_each_prompt(llm):
    assert len(generate(llm, TEXTS)) == len(llm.generate(TEXTS, use_tqdm=False, priority=[0] * len(TEXTS)))
    with pytest.raises(RequestError, match="priority must be left out without LLM"):
        llm.generate(TEXTS[:2], use_tqdm=False, priority=[0, 1])
    with pytest.raises(RequestError, match="priority has 1 entries for 2 prompts"):
        llm.generate(TEXTS[:2], use_tqdm=False, priority=[0])


def test_the_smaller_priority_runs_first(folder):
    with LLM(
        folder, num_gpu_blocks_override=64, scheduling_policy="priority", **{**OPTIONS, "max_num_seqs": 1}
    ) as one_by_one:
        results = one_by_one.generate(TEXTS, SamplingParams(**GREEDY), use_tqdm=False, priority=[3, 1, 4, 0, 2])
        waited = [result.outputs[0].times.scheduled_s for result in results]
    assert waited[1] < waited[0], "two at a time are in the engine: the second runs before the first"
    assert max(waited[3], waited[4]) < waited[2], "both come after the third and run before it"


def test_cached_prefixes_can_be_forgotten(llm):
    prompt = list(range(200, 221))
    cached = [generate(llm, prompt)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache()
    assert [*cached, generate(llm, prompt)[0].num_cached_tokens] == [0, 20, 0]
    assert llm.get_tokenizer() is llm.tokenizer


def test_the_names_of_vllm_and_a_chat_template_start_an_engine(folder, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages[0]['content'] }}")
    options = {"model": folder, "tensor_parallel_size": 1, "num_gpu_blocks_override": 64, "trust_remote_code": True}
    with LLM(**options, **OPTIONS, chat_template=tmp_path / "template.jinja") as named:
        (answer,) = named.chat([{"role": "user", "content": TEXTS[0]}], SamplingParams(**GREEDY), use_tqdm=False)
        assert named.config.num_gpu_blocks_override == 64
    assert answer.prompt_token_ids == named.tokenizer.encode(TEXTS[0], add_special_tokens=False)
    with pytest.raises(ConfigError, match="tensor_paralel_size must be left out; did you mean tensor_parallel_size"):
        LLM(folder, tensor_paralel_size=2)


def test_the_second_time_a_prompt_comes_from_the_cache(llm):
    prompt = list(range(100, 121))
    first, second = (generate(llm, prompt, SamplingParams(**GREEDY))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 20)
    assert tokens_of([first]) == tokens_of([second])


def test_times_are_reported_for_every_sequence(llm):
    for result in generate(llm, TEXTS[:2], SamplingParams(n=2, max_tokens=5, stop=["e"])):
        for output in result.outputs:
            assert 0 <= output.times.scheduled_s <= output.times.first_token_s <= output.times.finished_s


# -- chat ------------------------------------------------------------------------------------------------------


def test_chat_continues_the_models_own_template(llm):
    messages = [{"role": "system", "content": "quick"}, {"role": "user", "content": "What is a fox?"}]
    text = "<|im_start|>system\nquick<|im_end|>\n<|im_start|>user\nWhat is a fox?<|im_end|>\n<|im_start|>assistant\n"
    params = SamplingParams(**GREEDY)
    (answer,) = llm.chat(messages, params, use_tqdm=False)
    assert answer.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert tokens_of([answer]) == tokens_of(generate(llm, answer.prompt_token_ids, params))


def test_several_conversations_are_answered_in_their_order(llm):
    conversations = [[{"role": "user", "content": text}] for text in TEXTS]
    params = [SamplingParams(**{**GREEDY, "max_tokens": 2 + i}) for i in range(len(TEXTS))]
    answers = llm.chat(conversations, params, use_tqdm=False)
    for conversation, p, answer in zip(conversations, params, answers, strict=True):
        assert tokens_of([answer]) == tokens_of(llm.chat(conversation, p, use_tqdm=False))


@pytest.mark.slow
def test_an_answer_may_be_as_long_as_the_context_allows(llm):
    bias = {EOS: -100.0}
    (answer,) = llm.chat(
        [{"role": "user", "content": "a"}], SamplingParams(max_tokens=None, logit_bias=bias), use_tqdm=False
    )
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == llm.max_model_len
    assert answer.outputs[0].finish_reason == "length"


def test_template_arguments_reach_the_template(llm):
    messages = [{"role": "user", "content": "a"}]
    settings = SamplingParams(**GREEDY)
    with_turn, without = (
        llm.chat(messages, settings, use_tqdm=False, add_generation_prompt=flag)[0] for flag in (True, False)
    )
    assert len(with_turn.prompt_token_ids) > len(without.prompt_token_ids)


def test_variables_of_the_template_come_in_their_own_argument_and_a_misspelt_one_is_refused(llm):
    messages, settings = [{"role": "user", "content": "a"}], SamplingParams(**GREEDY)
    (answer,) = llm.chat(messages, settings, False, chat_template_kwargs={"enable_thinking": False})
    assert answer.prompt_token_ids == llm.chat(messages, settings, False)[0].prompt_token_ids
    with pytest.raises(RequestError, match="has no argument 'enable_thinking'; it has messages, sampling"):
        llm.chat(messages, settings, enable_thinking=False)
    with pytest.raises(InvalidParameter, match="continue_final_message must be False with add_generation_prompt"):
        llm.chat(messages, settings, continue_final_message=True)


def test_outputs_need_no_text_and_prompts_no_cache_if_the_parameters_say_so(llm):
    prompt = list(range(250, 271))
    plain, fresh = manta.SamplingParams(**GREEDY), manta.SamplingParams(**GREEDY, skip_reading_prefix_cache=True)
    first, again, computed = (generate(llm, prompt, params)[0] for params in (plain, plain, fresh))
    assert (again.num_cached_tokens, computed.num_cached_tokens) == (20, 0)
    (silent,) = generate(llm, prompt, manta.SamplingParams(**GREEDY, detokenize=False))
    assert tokens_of([first]) == tokens_of([computed]) == tokens_of([silent])
    assert first.outputs[0].text and not silent.outputs[0].text


def test_fields_may_be_set_until_the_call_and_are_checked_then(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.ignore_eos = 3, True
    assert len(only(llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)).token_ids) == 3
    params.top_p = 2.0
    with pytest.raises(InvalidParameter, match="top_p must be above 0 and at most 1"):
        generate(llm, "a", params)
    with pytest.raises(InvalidParameter, match="sampling_params must be SamplingParams"):
        generate(llm, "a", [{"n": 1}])


# -- n and seeds -----------------------------------------------------------------------------------------------


def test_n_sequences_differ_and_repeat_with_their_seed(llm):
    params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
    first, second = generate(llm, TEXTS[0], params), generate(llm, TEXTS[0], params)
    assert [output.index for output in first[0].outputs] == [0, 1, 2, 3]
    assert tokens_of(first) == tokens_of(second)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 4


def test_the_first_of_n_sequences_is_what_n_1_gives(llm):
    settings = {"seed": 7, "max_tokens": 12, "ignore_eos": True}
    several = generate(llm, TEXTS[0], SamplingParams(n=3, **settings))
    assert tokens_of(several)[0] == only(generate(llm, TEXTS[0], SamplingParams(**settings))).token_ids


def test_n_sequences_without_a_seed_differ(llm):
    results = generate(llm, [TEXTS[0]] * 2, SamplingParams(n=2, max_tokens=12, ignore_eos=True))
    assert len({tuple(tokens) for tokens in tokens_of(results)}) == 4


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), -1])
def test_every_seed_that_is_allowed_works_with_n(llm, seed):
    (result,) = generate(llm, TEXTS[0], SamplingParams(n=3, seed=seed, max_tokens=6, ignore_eos=True))
    assert [output.finish_reason for output in result.outputs] == ["length"] * 3
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3


MIXED = [
    SamplingParams(**GREEDY),
    SamplingParams(seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=24, ignore_eos=True, top_p=0.8, temperature=0.7),
    SamplingParams(seed=3, max_tokens=20, ignore_eos=True, top_k=20, repetition_penalty=1.3),
    SamplingParams(seed=4, max_tokens=18, ignore_eos=True, min_p=0.05, presence_penalty=0.5, logit_bias={30: 3.0}),
    SamplingParams(seed=5, max_tokens=9, min_tokens=4, logprobs=2, frequency_penalty=0.4),
    SamplingParams(**{**GREEDY, "max_tokens": 22}, bad_words=["the"], prompt_logprobs=1),
    SamplingParams(seed=6, max_tokens=20, ignore_eos=True, extra_args=encoded(ThinkingBudget(9, close=77))),
]


@pytest.fixture(scope="module")
def mixed_alone(llm) -> list[list[int]]:
    """Each of MIXED by itself."""
    return [only(generate(llm, TEXTS[i % len(TEXTS)], params)).token_ids for i, params in enumerate(MIXED)]


@pytest.mark.parametrize("name", ["llm", "plain_llm", "small_llm"])
def test_tokens_repeat_whatever_the_batch_with_and_without_overlap_and_after_preemption(name, mixed_alone, request):
    engine: LLM = request.getfixturevalue(name)
    before = engine.stats().preemptions
    together = generate(engine, [TEXTS[i % len(TEXTS)] for i in range(len(MIXED))], MIXED)
    assert tokens_of(together) == mixed_alone
    backwards = [TEXTS[i % len(TEXTS)] for i in reversed(range(len(MIXED)))]
    assert tokens_of(generate(engine, backwards, MIXED[::-1])) == mixed_alone[::-1]
    assert (engine.stats().preemptions > before) == (name == "small_llm")


def test_reasoning_ends_after_its_budget_and_what_is_before_and_short_reasoning_are_as_without(llm):
    free = only(generate(llm, TEXTS[0], SamplingParams(**GREEDY))).token_ids
    close = next(token for token in range(100, 500) if token not in free)

    def tokens(tokens: int, close: int, opening: int | None = None) -> list[int]:
        params = SamplingParams(**GREEDY, extra_args=encoded(ThinkingBudget(tokens, close, opening)))
        return only(generate(llm, TEXTS[0], params)).token_ids

    for budget in (0, 1, 7):
        assert tokens(budget, close)[: budget + 1] == [*free[:budget], close]
        assert tokens(budget, close, free[0])[: budget + 2] == [*free[: budget + 1], close]
        assert tokens(budget, close, close) == free
    assert tokens(8, free[5]) == free
    assert tokens(16, close) == free


# -- ends ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_text(llm, letters):
    """Greedy output of letters only, and its text up to each token."""
    output = only(generate(llm, TEXTS[0], SamplingParams(**GREEDY, allowed_token_ids=letters)))
    parts = [llm.tokenizer.token_text(token) for token in output.token_ids]
    assert output.text == "".join(parts)
    return output.text, parts


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(llm, letters, plain_text):
    text, parts = plain_text
    stop = parts[5][-1] + parts[6] + parts[7][0]
    assert text.index(stop) == len("".join(parts[:6])) - 1, "its first occurrence is the one meant here"
    params = {**GREEDY, "allowed_token_ids": letters, "stop": ["never said", stop]}
    output = only(generate(llm, TEXTS[0], SamplingParams(**params)))
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) == 8, "up to the token that completed it"
    included = only(generate(llm, TEXTS[0], SamplingParams(**params, include_stop_str_in_output=True)))
    assert included.text == text[: text.index(stop)] + stop
    assert included.token_ids == output.token_ids


def test_text_that_only_begins_like_a_stop_string_is_kept(llm, letters, plain_text):
    text, _ = plain_text
    params = SamplingParams(**GREEDY, allowed_token_ids=letters, stop=[text[-3:] + "!", text[4:7] + "?"])
    output = only(generate(llm, TEXTS[0], params))
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "length", None)


def test_a_stop_string_does_not_count_before_the_minimum_length(llm, letters, plain_text):
    _, parts = plain_text
    stop = parts[2]
    params = SamplingParams(**GREEDY, allowed_token_ids=letters, stop=[stop], min_tokens=6)
    output = only(generate(llm, TEXTS[0], params))
    assert len(output.token_ids) >= 6
    assert output.text.startswith("".join(parts[:6]))


def test_each_of_n_sequences_ends_at_its_own_stop_string(llm, letters):
    params = SamplingParams(n=4, seed=1, max_tokens=40, allowed_token_ids=letters, stop=["e"])
    (result,) = generate(llm, TEXTS[0], params)
    for output in result.outputs:
        assert "e" not in output.text
        assert (output.finish_reason, output.stop_reason) == ("stop", "e")
    assert len({len(output.token_ids) for output in result.outputs}) > 1


def test_a_stop_token_ends_the_request_and_is_no_text(llm, letters, plain_text):
    _, parts = plain_text
    whole = only(generate(llm, TEXTS[0], SamplingParams(**GREEDY, allowed_token_ids=letters)))
    stop = next(token for i, token in enumerate(whole.token_ids) if i >= 4 and token not in whole.token_ids[:i])
    place = whole.token_ids.index(stop)
    params = {**GREEDY, "allowed_token_ids": letters, "stop_token_ids": [stop]}
    output = only(generate(llm, TEXTS[0], SamplingParams(**params)))
    assert output.token_ids == whole.token_ids[: place + 1]
    assert output.text == "".join(parts[:place])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_the_end_of_sequence_token_ends_a_request_unless_it_is_ignored(llm):
    likely = {EOS: 100.0}
    output = only(generate(llm, TEXTS[0], SamplingParams(temperature=0.0, logit_bias=likely)))
    assert (output.text, output.token_ids) == ("", [EOS])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    output = only(generate(llm, TEXTS[0], SamplingParams(**GREEDY, logit_bias=likely)))
    assert (output.text, output.token_ids, output.finish_reason) == ("", [EOS] * 16, "length")


def test_the_end_of_sequence_token_waits_for_the_minimum_length(llm):
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, min_tokens=5)
    output = only(generate(llm, TEXTS[0], params))
    assert len(output.token_ids) == 6
    assert output.token_ids.index(EOS) == 5
    assert output.finish_reason == "stop"


def test_special_tokens_are_text_if_asked_for(llm):
    params = SamplingParams(**GREEDY, logit_bias={EOS: 100.0}, skip_special_tokens=False)
    assert only(generate(llm, TEXTS[0], params)).text == "<|im_end|>" * 16


# -- what may be said ------------------------------------------------------------------------------------------


def test_a_bad_word_of_one_token_is_not_said(llm, letters):
    params = SamplingParams(**GREEDY, allowed_token_ids=letters)
    before = only(generate(llm, TEXTS[0], params))
    word = next(
        text
        for token in before.token_ids
        if llm.tokenizer.encode(text := llm.tokenizer.token_text(token)) == [token] and len(text) > 1
    )
    banned = llm.tokenizer.encode(word)[0]
    after = only(generate(llm, TEXTS[0], SamplingParams(**GREEDY, allowed_token_ids=letters, bad_words=[word])))
    assert banned in before.token_ids
    assert banned not in after.token_ids
    place = before.token_ids.index(banned)
    assert after.token_ids[:place] == before.token_ids[:place]


def test_a_bad_word_of_two_tokens_bans_the_second_only_after_the_first(llm):
    a, b = llm.tokenizer.encode("xz")
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": [a, b]}
    free = only(generate(llm, TEXTS[0], SamplingParams(**params, logit_bias={a: 50.0, b: 50.0})))
    bound = only(generate(llm, TEXTS[0], SamplingParams(**params, bad_words=["xz"])))
    assert "xz" in free.text, "it would be said"
    assert "xz" not in bound.text
    assert set(bound.token_ids) <= {a, b}


def test_only_allowed_tokens_are_said(llm):
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1, temperature=2.0, allowed_token_ids=[40, 50, 60])
    assert set(only(generate(llm, TEXTS[0], params)).token_ids) == {40, 50, 60}


# -- log-probabilities -----------------------------------------------------------------------------------------


def test_log_probabilities_are_given_for_each_token_where_asked_for(llm):
    params = [
        SamplingParams(**GREEDY, logprobs=3),
        SamplingParams(**GREEDY, logprobs=0, prompt_logprobs=2),
        SamplingParams(**GREEDY),
    ]
    three, none, without = generate(llm, [TEXTS[0]] * 3, params)
    output = three.outputs[0]
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert all([e.rank for e in entry.values()] == [1, 2, 3] for entry in output.logprobs), "it was greedy"
    first = [next(iter(entry.values())) for entry in output.logprobs]
    assert [e.decoded_token for e in first] == [llm.tokenizer.token_text(token) for token in output.token_ids]
    assert output.cumulative_logprob == pytest.approx(sum(e.logprob for e in first))
    assert [list(entry) for entry in none.outputs[0].logprobs] == [[token] for token in none.outputs[0].token_ids]
    assert none.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in none.prompt_logprobs[1:]] == none.prompt_token_ids[1:]
    assert all({1, 2} <= {e.rank for e in entry.values()} and len(entry) <= 3 for entry in none.prompt_logprobs[1:])
    assert without.outputs[0].logprobs is without.outputs[0].cumulative_logprob is without.prompt_logprobs is None


def test_log_probabilities_end_where_a_stop_string_does(llm, letters, plain_text):
    _, parts = plain_text
    params = SamplingParams(**GREEDY, allowed_token_ids=letters, stop=[parts[5]], logprobs=1)
    output = only(generate(llm, TEXTS[0], params))
    assert len(output.logprobs) == len(output.token_ids) < 16


def test_log_probabilities_are_those_of_the_model_before_any_edit(llm):
    plain = only(generate(llm, TEXTS[0], SamplingParams(**{**GREEDY, "max_tokens": 1}, logprobs=2)))
    _, second = plain.logprobs[0]
    params = SamplingParams(**{**GREEDY, "max_tokens": 1}, logprobs=2, allowed_token_ids=[second])
    forced = only(generate(llm, TEXTS[0], params)).logprobs[0]
    assert (next(iter(forced)), forced[second].rank, forced) == (second, 2, plain.logprobs[0])


# -- refusals and broken-off iterations ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, InvalidParameter, "prompt must be at least one token"),
        ("", {}, InvalidParameter, "prompt must be at least one token"),
        ([1] * 512, {}, PromptTooLong, "prompt is too long: 512 tokens > 511"),
        ([1, 100_000], {}, InvalidParameter, "prompt must be token ids from 0 to"),
        ([1], {"stop_token_ids": [100_000]}, InvalidParameter, "stop_token_ids must be a token id below"),
        ([1], {"logit_bias": {100_000: 1.0}, "n": 3}, InvalidParameter, "logit_bias must be a token id below"),
    ],
)
def test_one_refused_request_raises_before_anything_runs(llm, prompt, params, error, message):
    before = llm.stats()
    with pytest.raises(error, match=message):
        generate(llm, [TEXTS[0], prompt], [SamplingParams(), SamplingParams(**params)])
    assert llm.stats() == before


def test_run_yields_refused_requests_with_the_reason_and_computes_the_others(llm):
    params = SamplingParams(**GREEDY, n=2)
    prompts = [[1] * 600, TEXTS[0], "", TEXTS[1]]
    jobs = [(llm.request(prompt, params), params) for prompt in prompts]
    results = {result.request_id: result for result in llm.run(jobs, use_tqdm=False)}
    assert set(results) == {request.request_id for request, _ in jobs}, "each once"
    reasons = [[output.finish_reason for output in request.outputs] for request, _ in jobs]
    assert reasons == [["error"] * 2, ["length"] * 2, ["error"] * 2, ["length"] * 2]
    assert "> 511" in jobs[0][0].outputs[0].error
    assert jobs[1][0].outputs[0].error is None


def test_run_reads_its_jobs_only_as_fast_as_they_are_computed(llm):
    read = []

    def jobs():
        for i in range(200):
            read.append(i)
            params = SamplingParams(**{**GREEDY, "max_tokens": 4})
            yield llm.request([1, 2, 3], params), params

    results = llm.run(jobs(), use_tqdm=False)
    next(results)
    assert len(read) < 20
    results.close()


def test_an_iteration_that_is_broken_off_leaves_nothing_and_the_next_is_not_disturbed(llm):
    params = SamplingParams(**GREEDY, n=2)
    expected = tokens_of(generate(llm, TEXTS, params))
    for taken in range(3):
        results = llm.run(((llm.request(text, params), params) for text in TEXTS), use_tqdm=False)
        for _ in range(taken):
            next(results)
        results.close()
        assert llm.stats().blocks_used == 0
        assert tokens_of(generate(llm, TEXTS, params)) == expected


def test_a_request_that_fails_says_why_and_the_others_are_computed(llm):
    params = [SamplingParams(**GREEDY), SamplingParams(allowed_token_ids=[EOS], min_tokens=2)]
    good, bad = generate(llm, TEXTS[:2], params)
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"
    assert "all tokens are banned" in bad.outputs[0].error


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is missing"):
        LLM(make_model(tmp_path, "llama"))


def test_top_logprobs_are_those_of_the_request_alone_whatever_others_ask_for(tmp_path):
    folder = make_model(tmp_path, "llama", tokenizer=True, vocab_size=4000)  # in bfloat16 many of its logits are equal
    prompts = [[5 + i, 6, 7] for i in range(4)]
    counts = [1, 3, 5, 20]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=count) for count in counts]
    with LLM(folder, dtype="bfloat16", num_threads=1, num_gpu_blocks_override=16) as llm:
        alone = [llm.generate([p], [q], use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
        together = llm.generate(prompts, params, use_tqdm=False)
    for count, one, other in zip(counts, alone, together, strict=True):
        for entry, same in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert list(entry) == list(same)
            assert [e.logprob for e in entry.values()] == [e.logprob for e in same.values()]
            assert [e.rank for e in entry.values()] == [*range(1, count + 1)]  # the most likely one is sampled here
