"""`LLM.embed` and `LLM.score`: the same numbers as transformers, whatever the batch."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from engine import LLM, PoolingParams, SamplingParams
from engine.errors import (
    ConfigError,
    EngineError,
    InvalidParameter,
    ModelFolderError,
    PromptTooLong,
    RequestError,
    UnsupportedTask,
)
from engine.model.config import ModelConfig
from engine.model.models.encoders.bert import BertModel
from engine.pooling.score_prompt import AFTER, names_roles, score_prompt
from engine.pooling.text_encoder import TextEncoder
from tests.models import make_model
from tests.pooling_models import (
    CLASSIFIERS,
    EMBEDDINGS,
    KINDS,
    RERANKERS,
    TEXTS,
    TOKEN_CLASSIFIERS,
    Reference,
    make,
    write_json,
)
from tests.transformers_models import make_transformers_model

OPTIONS = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_threads": 1}
PROMPTS = "config_sentence_transformers.json"
KEEP = PoolingParams(truncate_prompt_tokens=-1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name: str):
        if name not in made:
            made[name] = make(tmp_path_factory.mktemp(name), KINDS[name])
        return made[name]

    return folder


@pytest.fixture
def open_llm():
    opened = []

    def make_llm(folder, **options) -> LLM:
        opened.append(LLM(folder, **{**OPTIONS, "num_gpu_blocks_override": 128, **options}))
        return opened[-1]

    yield make_llm
    for llm in opened:
        assert llm.stats().blocks_used == llm.stats().running == llm.stats().waiting == 0
        llm._core.scheduler.check()
        llm.close()


def vectors(llm: LLM, prompts, params=None) -> np.ndarray:
    return np.array([output.outputs.embedding for output in llm.embed(prompts, params, use_tqdm=False)])


def scores(llm: LLM, query, documents, params=None, **options) -> list[float]:
    return [out.outputs.score for out in llm.score(query, documents, params, use_tqdm=False, **options)]


# -- the same as transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_those_of_transformers_alone_and_in_a_batch(name, folders, open_llm):
    llm, reference = open_llm(folders(name)), Reference(folders(name), EMBEDDINGS[name])
    ids = [TextEncoder(llm.tokenizer).encode([text], llm.max_model_len)[0] for text in TEXTS]
    expected = np.stack([reference.embed(own).numpy() for own in ids])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(vectors(llm, TEXTS, KEEP), expected, atol=1e-5 * scale, rtol=0)
    np.testing.assert_allclose(vectors(llm, TEXTS[0], KEEP), expected[:1], atol=1e-5 * scale, rtol=0)
    np.testing.assert_allclose(vectors(llm, [ids[1], TEXTS[2]]), expected[1:3], atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_of_a_reranker_are_those_of_transformers(name, folders, open_llm):
    llm, reference = open_llm(folders(name)), Reference(folders(name), RERANKERS[name])
    documents = ["the lazy dog", "A cache keeps what was", "fox"]
    expected = [reference.score("the quick fox", document) for document in documents]
    assert scores(llm, "the quick fox", documents) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 3


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_of_a_text_are_those_of_transformers_alone_and_in_a_batch(name, folders, open_llm):
    llm, reference = open_llm(folders(name)), Reference(folders(name), CLASSIFIERS[name])
    ids = [TextEncoder(llm.tokenizer).encode([text], llm.max_model_len)[0] for text in TEXTS]
    logits = torch.stack([reference.logits(own) for own in ids])
    expected = logits.sigmoid() if name == "toxic_roberta" else logits.softmax(-1)
    found = [output.outputs.probs for output in llm.classify(TEXTS, KEEP, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (alone,) = llm.classify([ids[0]], PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose(alone.outputs.probs, logits[0], atol=1e-4)
    assert alone.outputs.num_classes == (2 if name == "modernbert_topics" else 3)


@pytest.mark.parametrize("name", TOKEN_CLASSIFIERS)
def test_classes_of_each_token_are_those_of_transformers_alone_and_in_a_batch(name, folders, open_llm):
    reference = Reference(folders(name), TOKEN_CLASSIFIERS[name])
    check_token_vectors(open_llm(folders(name)), "token_classify", lambda ids: reference.logits(ids).softmax(-1))


@pytest.mark.parametrize("name", ["minilm", "gte_modernbert", "qwen3_embedding", "embedding_gemma_2"])
def test_vectors_of_each_token_are_those_of_transformers_alone_and_in_a_batch(name, folders, open_llm):
    check_token_vectors(open_llm(folders(name)), "token_embed", Reference(folders(name), EMBEDDINGS[name]).vectors)


def check_token_vectors(llm: LLM, task: str, expected) -> None:
    """Several texts together, and one of them alone, have a row of numbers for each of their tokens."""
    both = [llm.encode(some, KEEP, pooling_task=task, use_tqdm=False) for some in (TEXTS, TEXTS[0])]
    for output in both[0] + both[1]:
        numbers = expected(output.prompt_token_ids).numpy()
        assert output.outputs.data.shape == numbers.shape
        np.testing.assert_allclose(output.outputs.data, numbers, atol=1e-5 * max(1, np.abs(numbers).max()))


def test_a_decoder_that_scores_texts_scores_each_of_their_tokens_too(folders, open_llm):
    llm = open_llm(folders("qwen3_guard"), max_num_batched_tokens=5)
    (output,) = llm.encode(TEXTS[0], pooling_task="token_classify", use_tqdm=False)
    (last,) = llm.classify(TEXTS[0], use_tqdm=False)
    np.testing.assert_allclose(output.outputs.data[-1], last.outputs.probs, atol=1e-5)
    assert len(output.outputs.data) == len(output.prompt_token_ids) > 5


def test_scores_of_an_embedding_model_are_cosines(folders, open_llm):
    llm = open_llm(folders("distilroberta"))
    query, *documents = vectors(llm, ["the fox", "a dog", "A cache keeps"])
    norm = np.linalg.norm
    expected = [query @ d / norm(query) / norm(d) for d in documents]
    assert scores(llm, "the fox", ["a dog", "A cache keeps"]) == pytest.approx(expected, abs=1e-6)


def test_scores_of_a_generative_reranker_are_its_probability_of_yes(tmp_path, open_llm):
    folder = make_model(tmp_path, "qwen3", tokenizer=True)
    llm = open_llm(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer, words = llm.tokenizer, json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    with pytest.raises(RequestError, match="'yes' and 'no' are not both in its vocabulary"):
        scores(llm, "what", ["a"])
    write_json(folder / "modules.json", [logit_score()])
    write_json(folder / "1_LogitScore/config.json", {"true_token_id": words["t"], "false_token_id": words["o"]})
    llm = open_llm(folder)
    expected = []
    for document in ("a fox", "dogs"):
        prompt = tokenizer.render_chat_template(
            [{"role": "query", "content": "what"}, {"role": "document", "content": document}]
        )
        logits = model(torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])).logits[0, -1]
        expected.append((logits[words["t"]] - logits[words["o"]]).item())
    raw = scores(llm, "what", ["a fox", "dogs"], PoolingParams(use_activation=False))
    assert raw == pytest.approx(expected, abs=1e-4)
    assert scores(llm, "what", ["a fox", "dogs"]) == pytest.approx([1 / (1 + np.exp(-s)) for s in expected], abs=1e-5)


def test_on_a_gpu_a_generative_reranker_has_the_same_scores_and_the_host_does_not_wait(tmp_path, open_llm, request):
    folder = make_model(tmp_path, "qwen3", tokenizer=True)
    write_json(folder / "modules.json", [logit_score()])
    write_json(folder / "1_LogitScore/config.json", {"true_token_id": 5, "false_token_id": 6})
    expected = scores(open_llm(folder), "what", ["a fox", "dogs"])
    request.getfixturevalue("late")
    assert scores(open_llm(folder), "what", ["a fox", "dogs"]) == pytest.approx(expected, abs=1e-5)


def logit_score() -> dict:
    return {
        "idx": 1,
        "path": "1_LogitScore",
        "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    }


def test_a_reranker_with_a_score_head_reads_queries_and_documents_by_its_template(tmp_path, open_llm):
    folder = make(tmp_path, RERANKERS["qwen3_reranker_seq_cls"])
    (folder / "chat_template.jinja").write_text(
        "{% set task = (messages | selectattr('role', 'eq', 'system') | list) %}"
        "{{ task[0].content if task else 'rank' }}"
        "{% for m in messages if m.role == \"query\" or m.role == 'document' %}|{{ m.content }}{% endfor %}"
    )
    llm, reference = open_llm(folder), Reference(folder, RERANKERS["qwen3_reranker_seq_cls"])
    for instruction, text in ((None, "rank|what|a fox"), ("find", "find|what|a fox")):
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        (output,) = llm.score("what", "a fox", instruction=instruction, use_tqdm=False)
        assert output.prompt_token_ids == ids
        assert output.outputs.score == pytest.approx(reference.logits(ids).sigmoid().item(), abs=1e-5)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}{% if m['role'] == \"document\" %}",
            True,
        ),
        ("{% for m in messages if m.role == 'query' or m.role == 'document' %}{{ m.content }}{% endfor %}", True),
        ("{% if m.role == 'query' %}{{ m.content }}{% endif %}", False),
        ("{{ {'query': 1, 'document': 2} }}", False),
        (None, False),
    ],
)
def test_a_template_that_tells_queries_from_documents_is_known_by_the_roles(template, expected):
    assert names_roles(template) == expected


def test_the_prompt_of_a_qwen3_reranker_is_that_of_its_card(tmp_path, open_llm):
    llm = open_llm(make_model(tmp_path, "qwen3", tokenizer=True))
    prompt, end = score_prompt(llm.tokenizer, "a {query}", "a document", has_template=False)
    assert prompt.endswith(
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: a {query}\n<Document>: a document<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert prompt.startswith(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    )
    assert end == AFTER
    assert "<Instruct>: find dogs\n" in score_prompt(llm.tokenizer, "q", "d", "find dogs", has_template=False)[0]


# -- how a prompt is computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_embedding", "e5_mistral"])
def test_a_prompt_in_chunks_has_the_same_embedding(name, folders, open_llm):
    whole = vectors(open_llm(folders(name)), TEXTS, KEEP)
    chunked = open_llm(folders(name), max_num_batched_tokens=5)
    np.testing.assert_allclose(vectors(chunked, TEXTS, KEEP), whole, atol=1e-5)
    assert chunked.stats().steps > 10


def test_the_last_token_of_a_cached_prefix_is_enough_where_it_is_what_is_pooled(folders, open_llm):
    llm = open_llm(folders("qwen3_embedding"))
    first = llm.embed(TEXTS[0], use_tqdm=False)[0]
    second = llm.embed(TEXTS[0], use_tqdm=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (len(first.prompt_token_ids) - 1) // 4 * 4)
    np.testing.assert_allclose(second.outputs.embedding, first.outputs.embedding, atol=1e-5)


def test_vectors_of_each_token_are_of_the_whole_prompt_in_chunks_and_after_a_cached_prefix(folders, open_llm):
    params = PoolingParams(truncate_prompt_tokens=-1, dimensions=8)
    whole = [out.outputs.data for out in pooled(open_llm(folders("qwen3_embedding")), "token_embed", params)]
    llm = open_llm(folders("qwen3_embedding"), max_num_batched_tokens=5)
    vectors(llm, TEXTS, KEEP)  # which leaves prefixes in the cache
    for output, expected in zip(pooled(llm, "token_embed", params), whole, strict=True):
        assert output.num_cached_tokens == 0
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-5)


def pooled(llm: LLM, task: str, params: PoolingParams):
    return llm.encode(TEXTS, params, pooling_task=task, use_tqdm=False)


@pytest.mark.parametrize("name", ["e5_mistral", "minilm"])
def test_a_mean_takes_nothing_from_the_prefix_cache(name, folders, open_llm):
    llm = open_llm(folders(name))
    first, second = llm.embed([TEXTS[0]] * 2, KEEP, use_tqdm=False)
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    np.testing.assert_allclose(second.outputs.embedding, first.outputs.embedding, atol=1e-6)


def test_an_encoder_takes_prompts_up_to_its_context_in_one_step_whatever_the_budget(folders, open_llm):
    llm = open_llm(folders("minilm"), max_num_batched_tokens=4)
    assert llm.max_model_len == 60  # of sentence_bert_config.json, below the 66 positions
    long = [5] * 60
    assert vectors(llm, [long]).shape == (1, 48)
    assert llm.stats().steps == 1
    np.testing.assert_allclose(vectors(llm, [long, [6, 7], long])[0], vectors(llm, [long])[0], atol=1e-6)


def test_requests_that_do_not_fit_a_step_wait_for_the_next(folders, open_llm):
    llm = open_llm(folders("bge"), max_num_seqs=16)
    prompts = [[4 + i] * (20 + i) for i in range(12)]
    alone = np.concatenate([vectors(llm, [prompt]) for prompt in prompts])
    before = llm.stats().steps
    np.testing.assert_allclose(vectors(llm, prompts), alone, atol=1e-6)
    assert 4 < llm.stats().steps - before < 12


def test_an_encoder_keeps_no_kv(folders, open_llm):
    runner = open_llm(folders("gte_modernbert"))._core.ranks.runner
    assert runner.kv_caches[0].numel() == 0


# -- parameters --------------------------------------------------------------------------------------------------


def test_dimensions_keep_the_first_numbers_at_length_one(folders, open_llm):
    llm = open_llm(folders("minilm"))
    whole, cut = vectors(llm, TEXTS[0]), vectors(llm, TEXTS[0], PoolingParams(dimensions=8))
    np.testing.assert_allclose(cut, whole[:, :8] / np.linalg.norm(whole[:, :8]), atol=1e-6)
    with pytest.raises(InvalidParameter, match="dimensions must be at most 48"):
        vectors(llm, TEXTS[0], PoolingParams(dimensions=49))


def test_use_activation_says_whether_an_embedding_is_normalised(folders, open_llm):
    llm = open_llm(folders("minilm"))
    raw = vectors(llm, TEXTS[0], PoolingParams(use_activation=False))
    np.testing.assert_allclose(vectors(llm, TEXTS[0]), raw / np.linalg.norm(raw), atol=1e-6)
    assert np.linalg.norm(raw) > 1.1


def test_the_files_of_a_reranker_say_whether_its_score_passes_a_sigmoid(folders, open_llm, tmp_path):
    folder = make(tmp_path, RERANKERS["bge_reranker"])
    (score,) = scores(open_llm(folder), "fox", "dog")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}})
    (raw,) = scores(open_llm(folder), "fox", "dog")
    assert score == pytest.approx(1 / (1 + np.exp(-raw)), abs=1e-6)


def test_the_prompts_of_a_model_stand_in_front_of_texts_and_not_of_token_ids(open_llm, tmp_path):
    folder = make(tmp_path, EMBEDDINGS["minilm"])
    plain = open_llm(folder)
    prompts = {"query": "what was ", "passage": "a "}
    write_json(folder / PROMPTS, {"prompts": prompts, "default_prompt_name": "passage"})
    llm = open_llm(folder)
    for name, before in [(None, "a "), ("query", "what was "), ("passage", "a ")]:
        found = [out.outputs.embedding for out in llm.embed(["fox"], prompt_name=name, use_tqdm=False)]
        np.testing.assert_array_equal(found, vectors(plain, [before + "fox"]))
    np.testing.assert_array_equal(vectors(llm, [[5, 6]]), vectors(plain, [[5, 6]]))
    query, document = vectors(plain, ["what was the fox", "a dog"])
    assert scores(llm, "the fox", ["dog"]) == pytest.approx([query @ document], abs=1e-6)
    with pytest.raises(InvalidParameter, match=r"prompt_name must be one of the model's prompts \(query, passage\)"):
        llm.embed(["fox"], prompt_name="other", use_tqdm=False)
    with pytest.raises(InvalidParameter, match="prompt_name must be left out, because this model has no prompts"):
        plain.embed(["fox"], prompt_name="query", use_tqdm=False)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"prompts": {"query": None}}, "prompts is not an object of texts"),
        ({"prompts": {"query": "a"}, "default_prompt_name": "document"}, "'document' is not among its prompts"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_at_start(tmp_path, config, problem):
    folder = make(tmp_path, EMBEDDINGS["minilm"])
    write_json(folder / PROMPTS, config)
    with pytest.raises(ModelFolderError, match=problem):
        ModelConfig.from_folder(folder)


def test_a_model_that_names_its_matryoshka_dimensions_is_cut_to_no_others(open_llm, tmp_path):
    folder = make(tmp_path, EMBEDDINGS["qwen3_embedding"])
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"matryoshka_dimensions": [8, 16]})
    llm = open_llm(folder)
    assert vectors(llm, ["fox"], PoolingParams(dimensions=16)).shape == (1, 16)
    with pytest.raises(InvalidParameter, match=r"dimensions must be one of the sizes .* \(8, 16\)"):
        vectors(llm, ["fox"], PoolingParams(dimensions=12))


def test_a_long_text_is_refused_or_cut_before_its_last_special_token(folders, open_llm):
    llm = open_llm(folders("minilm"))
    text = "fox " * 100
    with pytest.raises(PromptTooLong, match=r"> 60 .*truncate_prompt_tokens can shorten it"):
        llm.embed(text, use_tqdm=False)
    (cut,) = llm.embed(text, PoolingParams(truncate_prompt_tokens=10), use_tqdm=False)
    whole = llm.tokenizer.encode(text)
    assert cut.prompt_token_ids == [*whole[:9], whole[-1]]
    (longest,) = llm.embed(text, KEEP, use_tqdm=False)
    assert len(longest.prompt_token_ids) == 60
    with pytest.raises(InvalidParameter, match="truncate_prompt_tokens must be at least 3 here, got 2"):
        llm.embed(text, PoolingParams(truncate_prompt_tokens=2), use_tqdm=False)


def test_of_a_long_pair_the_longer_text_is_cut_first_as_transformers_does(folders, open_llm):
    llm = open_llm(folders("ms_marco_minilm"))
    reference = Reference(folders("ms_marco_minilm"), RERANKERS["ms_marco_minilm"]).tokenizer
    for query, document in (
        ("fox", "dog " * 90),
        ("dog " * 90, "fox"),
        ("dog " * 50, "fox " * 51),
        ("a " * 9, "b " * 12),
    ):
        (output,) = llm.score(query, document, PoolingParams(truncate_prompt_tokens=20), use_tqdm=False)
        expected = reference(query, document, truncation="longest_first", max_length=20, padding=False)
        assert output.prompt_token_ids == expected["input_ids"]


def test_a_long_document_of_a_generative_reranker_loses_its_end(tmp_path, open_llm):
    folder = make_model(tmp_path, "qwen3", tokenizer=True)
    write_json(folder / "modules.json", [logit_score()])
    write_json(folder / "1_LogitScore/config.json", {"true_token_id": 5, "false_token_id": 6})
    llm = open_llm(folder)
    (output,) = llm.score("what", "fox " * 200, PoolingParams(truncate_prompt_tokens=50), use_tqdm=False)
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert len(output.prompt_token_ids) == 50
    assert text.endswith("fox<|im_end|>\n<|im_start|>assistant\n")


# -- errors ------------------------------------------------------------------------------------------------------


def test_what_a_classifier_cannot_do_is_refused_by_name(folders, open_llm):
    texts, tokens = open_llm(folders("bert_emotion")), open_llm(folders("bert_ner"))
    with pytest.raises(UnsupportedTask, match=r"cannot do 'score'; it can do: classify$"):
        texts.score("a", "b", use_tqdm=False)
    with pytest.raises(UnsupportedTask, match=r"cannot do 'classify'; it can do: token_classify$"):
        tokens.classify("a", use_tqdm=False)
    with pytest.raises(InvalidParameter, match="dimensions must be left out, because 'classify' makes no embeddings"):
        texts.classify("a", PoolingParams(dimensions=2), use_tqdm=False)


def test_what_a_model_cannot_do_is_refused_by_name(folders, open_llm):
    encoder, reranker = open_llm(folders("minilm")), open_llm(folders("bge_reranker"))
    base = open_llm(folders("qwen3_embedding"))
    with pytest.raises(UnsupportedTask, match="cannot do 'generate'; it can do: embed"):
        encoder.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(UnsupportedTask, match="cannot do 'generate'; it can do: embed"):
        base.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(UnsupportedTask, match="cannot do 'embed'; it can do: score"):
        reranker.embed([[5, 6]], use_tqdm=False)
    for llm in (encoder, reranker):
        with pytest.raises(RequestError, match="instruction must be left out"):
            llm.score("a", "b", instruction="c", use_tqdm=False)


def test_a_generative_model_makes_embeddings_of_its_last_token(tmp_path, open_llm):
    folder = make_model(tmp_path, "llama")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    prompts = [[5, 6, 7, 8, 9, 10], [11]]
    with torch.inference_mode():
        hidden = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    expected = np.stack([torch.nn.functional.normalize(h, dim=0).numpy() for h in hidden])
    make_tokenizer_for(folder)
    np.testing.assert_allclose(vectors(open_llm(folder), prompts), expected, atol=1e-5)


def make_tokenizer_for(folder) -> None:
    from tests.models import make_tokenizer

    make_tokenizer().save_pretrained(folder)


def test_hidden_states_that_are_not_finite_are_an_error(folders, open_llm):
    llm = open_llm(folders("minilm"))
    llm._core.ranks.runner.model.embeddings.LayerNorm.weight[0] = torch.nan
    with pytest.raises(EngineError, match="hidden states are not finite"):
        llm.embed(["a fox", "a dog"], use_tqdm=False)


def test_what_an_encoder_does_not_support_is_refused_at_start(folders):
    with pytest.raises(ConfigError, match="torch_compile must be left out"):
        LLM(folders("minilm"), **OPTIONS, torch_compile=True)
    two = SimpleNamespace(size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1 for an encoder"):
        BertModel(ModelConfig.from_folder(folders("minilm")), two)


def test_a_model_that_transformers_code_computes_makes_embeddings_as_well(tmp_path, open_llm):
    folder = make_transformers_model(tmp_path, "Olmo2ForCausalLM")
    make_tokenizer_for(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    prompts = [[5, 6, 7, 8, 9, 10], [11]]
    with torch.inference_mode():
        hidden = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    expected = np.stack([torch.nn.functional.normalize(h, dim=0).numpy() for h in hidden])
    np.testing.assert_allclose(vectors(open_llm(folder), prompts), expected, atol=1e-5)
