"""What vLLM's examples of offline inference do, with `manta` in the place of `vllm`.

They pass every argument of its command line, with its default, to `LLM`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import RequestError
from manta import LLM, EmbeddingRequestOutput, RequestOutput, SamplingParams, ScoringRequestOutput
from tests.pooling_models import EMBEDDINGS, RERANKERS, TEXTS, make

ARGUMENTS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "vllm_engine_args.yaml").read_text())
SMALL = {"num_gpu_blocks_override": 128, "max_num_seqs": 8, "num_threads": 1}
PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help?"},
    {"role": "user", "content": "What is an ocean?"},
]


def opened(model: str | Path, **arguments: Any) -> LLM:
    return LLM(**{**ARGUMENTS, **SMALL, "model": str(model), **arguments})


@pytest.fixture(scope="module")
def llm():
    with opened("pocket", scheduling_policy="priority") as llm:
        yield llm


def test_texts_are_continued_with_parameters_of_their_own(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.outputs[0].text and len(output.outputs[0].token_ids) <= 16


def test_texts_are_continued_with_the_models_parameters_and_some_of_them_changed(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.top_p, params.top_k = 5, 0.5, 0.9, 10
    outputs = llm.generate(PROMPTS, params)
    assert all(len(output.outputs[0].token_ids) <= 5 for output in outputs)


def test_one_conversation_and_a_batch_of_it_are_answered(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 6, 0.0
    (alone,) = llm.chat(CONVERSATION, params, use_tqdm=False)
    outputs = llm.chat([CONVERSATION] * 10, params, use_tqdm=True)
    assert [output.outputs[0].text for output in outputs] == [alone.outputs[0].text] * 10


def test_a_chat_has_a_template_of_its_own(llm, tmp_path):
    template = "{% for message in messages %}{{ message['content'] }}!{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    text = "".join(f"{message['content']}!" for message in CONVERSATION)
    for given in (template, str(file), file):
        (output,) = llm.chat(CONVERSATION, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=given)
        assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    (plain,) = llm.chat(CONVERSATION, SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.prompt_token_ids != output.prompt_token_ids


def test_a_number_is_the_priority_of_every_prompt(llm):
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False, priority=3)) == len(PROMPTS)
    assert len(llm.chat(CONVERSATION, SamplingParams(max_tokens=1), use_tqdm=False, priority=-1)) == 1


def test_texts_have_an_embedding(tmp_path):
    with opened(make(tmp_path, EMBEDDINGS["bge"]), runner="pooling", enforce_eager=True) as llm:
        outputs = llm.embed(TEXTS[1:4])
    assert all(isinstance(output, EmbeddingRequestOutput) for output in outputs)
    assert len({len(output.outputs.embedding) for output in outputs}) == 1


def test_documents_have_a_score(tmp_path):
    with opened(make(tmp_path, RERANKERS["ms_marco_minilm"]), runner="pooling", enforce_eager=True) as llm:
        outputs = llm.score(TEXTS[3], TEXTS[1:3])
    assert len(outputs) == 2
    assert all(isinstance(output, ScoringRequestOutput) and 0 <= output.outputs.score <= 1 for output in outputs)


@pytest.mark.parametrize("method", ["beam_search", "reward"])
def test_what_there_is_not_is_refused_by_name_with_what_there_is(llm, method):
    with pytest.raises(RequestError, match=rf"LLM\.{method} is not supported: .*use "):
        getattr(llm, method)(PROMPTS)
