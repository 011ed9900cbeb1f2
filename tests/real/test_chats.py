"""Answers of SmolLM2-135M-Instruct: against transformers' own reading of its file, and against themselves."""

from __future__ import annotations

import pytest
import torch
import transformers
from gguf import GGUFReader, dequantize
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, TensorProcessor, get_gguf_hf_weights_map

from engine.model.checkpoint import smollm2
from engine.model.checkpoint.folder import read_json
from engine.model.checkpoint.resolve import resolve
from engine.offline.llm import LLM
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams

SUBJECTS = (
    "oceans", "a dog", "the number 17", "Paris", "bread", "winter", "a good friend", "music", "日本", "prime numbers",
)  # fmt: skip
QUESTIONS = (
    "What is the first thing to know about {}?", "Write two sentences about {}.", "Why do people like {}?",
    "Make a list of three facts about {}.", "Explain {} to a child.",
)  # fmt: skip
CHATS = [[{"role": "user", "content": question.format(subject)}] for subject in SUBJECTS for question in QUESTIONS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
OPTIONS = {"model": "smollm2", "max_model_len": 512, "kv_cache_memory_bytes": 2**28}


def answers(llm: LLM, chats: list[list[dict[str, str]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.chat(chats, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def together(llm) -> list[list[int]]:
    """The answers, computed in one batch."""
    return answers(llm, CHATS)


def transformers_model() -> transformers.LlamaForCausalLM:
    """The model of transformers with the numbers that `gguf` reads, whose rows transformers puts in order."""
    fields = read_json(resolve("smollm2"), "config.json")
    fields.pop("quantization_config")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).float().eval()
    names = {own: name for name, own in get_gguf_hf_weights_map(model, TensorProcessor(), "llama").items()}
    heads = {name: fields[name] for name in ("num_attention_heads", "num_key_value_heads")}
    rows, found = LlamaTensorProcessor(heads), {tensor.name: tensor for tensor in GGUFReader(smollm2.path()).tensors}
    state = {}
    for own in model.state_dict():
        tensor = found.get(names[own], found["token_embd.weight"])  # to which the head is tied
        numbers = rows.process(dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
        state[own] = torch.from_numpy(numbers.copy())
    model.load_state_dict(state)
    return model


@torch.inference_mode()
def test_greedy_answers_of_fifty_chats_are_those_of_transformers_on_the_same_numbers():
    """Each token is the likeliest one after those before it, which makes them what transformers would generate."""
    oracle = transformers_model()
    with LLM(**OPTIONS, dtype="float32") as llm:
        outputs = llm.chat(CHATS, GREEDY, use_tqdm=False)
    assert len(outputs) == 50
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens, margins(logits, tokens)


def margins(logits: torch.Tensor, tokens: list[int]) -> list[tuple[int, float]]:
    """How much likelier another token is, by position, as a difference of logits."""
    found = logits.max(-1).values - logits[range(len(tokens)), tokens]
    return [(i, margin) for i, margin in enumerate(found.tolist()) if margin > 0]


def test_a_chat_has_the_same_answer_alone_as_among_others(llm, together):
    llm._core.scheduler.kv_cache.pool.clear_cache()
    assert [answers(llm, [chat])[0] for chat in CHATS[::5]] == together[::5]


def test_a_chat_has_the_same_answer_in_chunks(together):
    with LLM(**OPTIONS, max_num_seqs=16, max_num_batched_tokens=24, enable_prefix_caching=False) as llm:
        outputs = llm.chat(CHATS[::2], GREEDY, use_tqdm=False)
    assert all(len(output.prompt_token_ids) > 24 for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == together[::2]


def test_an_answer_that_another_engine_has_begun_ends_as_it_would_have(llm, together):
    prompts = [llm.tokenizer.apply_chat_template(chat) for chat in CHATS]
    begun = [prompt + answer[:7] for prompt, answer in zip(prompts, together, strict=True)]
    outputs = llm.generate(begun, SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [answer[7:] for answer in together]


def test_a_stop_string_ends_the_text_before_it(llm, together):
    wanted = [llm.tokenizer.decode(answer) for answer in together]
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=[" is", ","])
    outputs = [output.outputs[0] for output in llm.chat(CHATS, params, use_tqdm=False)]
    stopped = 0
    for output, text in zip(outputs, wanted, strict=True):
        places = [text.index(stop) for stop in params.stop if stop in text]
        assert output.text == text[: min(places, default=len(text))]
        assert (output.finish_reason == "stop" and output.stop_reason in params.stop) == bool(places)
        stopped += bool(places)
    assert 10 < stopped < len(CHATS)  # or nothing was shown


def test_drafts_change_no_answer(together):
    with LLM(**OPTIONS, speculative_config={"method": "ngram", "prompt_lookup_min": 1}) as llm:
        assert answers(llm, CHATS) == together
        drafted = llm.stats().record(SpecDecodeStats)
    assert drafted is not None and drafted.num_draft_tokens
