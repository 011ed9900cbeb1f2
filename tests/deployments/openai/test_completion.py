from __future__ import annotations

from tests.deployments.fake_api import fake_api, says, tokenizer

HELLO = [{"role": "user", "content": "hello"}]


async def test_every_form_of_prompt_reaches_the_engine(api):
    ids = tokenizer().encode("ab")
    for prompt, count in (("ab", 1), (ids, 1), (["ab", "ab"], 2), ([ids, ids, ids], 3)):
        response = (await api.post("completions", prompt=prompt, max_tokens=1)).json()
        assert len(response["choices"]) == count
        assert response["usage"]["prompt_tokens"] == count * len(ids)
    assert {tuple(request.prompt) for request in api.engine.added} == {tuple(ids)}


async def test_echo_of_token_ids_shows_their_text():
    async with fake_api(says("xy")) as api:
        ids = tokenizer().encode("ab", add_special_tokens=False)
        response = (await api.post("completions", prompt=ids, echo=True, max_tokens=2)).json()
        assert response["choices"][0]["text"] == "abxy"


async def test_streamed_echo_puts_the_prompt_into_the_first_chunk_of_each_choice():
    async with fake_api(says("xy")) as api:
        chunks = await api.stream("completions", prompt=["ab", "cd"], n=2, echo=True, logprobs=0, max_tokens=2)
        texts, tokens = [""] * 4, [[], [], [], []]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
        assert texts == ["abxy", "abxy", "cdxy", "cdxy"]
        assert ["".join(t) for t in tokens] == texts


async def test_usage_stands_in_every_chunk_if_asked_for_and_grows(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await api.stream("completions", prompt="ab", max_tokens=5, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5
    assert chunks[-1]["choices"] == []


async def test_no_usage_in_a_stream_unless_asked_for(api):
    continuous = {"continuous_usage_stats": True}
    for options in (None, {"include_usage": False}, continuous, {"include_usage": False, **continuous}):
        for route, prompt in (("completions", {"prompt": "ab"}), ("chat/completions", {"messages": HELLO})):
            chunks = await api.stream(route, **prompt, max_tokens=5, stream_options=options)
            assert not any(chunk.get("usage") for chunk in chunks)
            assert all(chunk["choices"] for chunk in chunks)


async def test_usage_in_the_chunks_of_a_chat_begins_without_tokens(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for n in (1, 2):
        chunks = await api.stream("chat/completions", messages=HELLO, max_tokens=5, n=n, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        totals = [chunk["usage"]["total_tokens"] - chunk["usage"]["prompt_tokens"] for chunk in chunks]
        assert counts == totals and counts[0] == 0 and counts[-1] == 5 * n
        assert "role" in chunks[0]["choices"][0]["delta"]


async def test_prompt_logprobs_are_one_per_token_of_the_prompt_by_token_id(api):
    response = (await api.post("completions", prompt="ab", prompt_logprobs=0, max_tokens=3)).json()
    first, second = tokenizer().encode("ab")
    choice = response["choices"][0]
    entry = {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
    assert choice["prompt_logprobs"] == [None, {str(second): entry}]
    assert choice["logprobs"] is None
    assert api.engine.added[0].prompt == [first, second]


async def test_token_ids_of_prompt_and_answer_are_there_if_asked_for():
    async with fake_api(says("xyz")) as api:
        ids, answer_ids = tokenizer().encode("ab"), tokenizer().encode("xyz")
        choice = (await api.post("completions", prompt="ab", max_tokens=3, return_token_ids=True)).json()["choices"][0]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, answer_ids)
        chunks = await api.stream("completions", prompt="ab", max_tokens=3, return_token_ids=True)
        assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == answer_ids
        assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
        plain = (await api.post("completions", prompt="ab", max_tokens=3)).json()["choices"][0]
        assert [plain[key] for key in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3


async def test_priority_reaches_engines_that_look_at_it():
    async with fake_api(has_priorities=True) as api:
        await api.post("completions", prompt="a", priority=-3, max_tokens=1)
        assert api.engine.added[0].priority == -3
