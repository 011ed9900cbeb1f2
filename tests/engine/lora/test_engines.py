"""Whole engines with adapters: their tokens are those of PEFT, alone and in any company."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.errors import ConfigError
from engine.lora.adapter_files import open_adapter
from engine.lora.errors import AdapterError
from engine.options.speculation import SpeculativeConfig
from engine.parts.lora.adapter_courier import AdapterCourier
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.answers import ask, prompt
from tests.engine.lora.adapted_models import ALL, BACKEND, NATIVE
from tests.engine.lora.peft_adapters import make_adapter
from tests.engine.spec_decode.draft_checkpoints import make_drafters
from tests.fake_drafter import WildDrafter, draft_always
from tests.models import make_model, with_slow
from tests.products import each_once, few, in_turns, pairwise, slow
from tests.rank_pool import RankPool

SIZES = {
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
    "num_threads": 1,
}
WAYS: dict[str, dict[str, Any]] = {
    "chunks and preemption": {"num_gpu_blocks_override": 9, "max_num_seqs": 4, "max_num_batched_tokens": 13},
    "drafts": {"speculative_config": SpeculativeConfig(method="ngram")},
    "two ranks": {"tensor_parallel_size": 2},
}


def config(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2}
    return EngineConfig(**{"model": str(folder), **defaults, **SIZES, **options})


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.fixture
def opened() -> Iterator[list[EngineCore]]:
    cores: list[EngineCore] = []
    yield cores
    for core in cores:
        core.close()


# merged layers, states, latents, windows with experts, and transformers' code
KINDS = ("llama", "phi3", "qwen3_next", "deepseek_v3", "gpt_oss", *BACKEND[:1])
OTHERS = [family for family in ALL if family not in KINDS]


@pytest.mark.parametrize(
    ("way", "family"), each_once(WAYS, [*KINDS[:2], *slow(KINDS[2:])]) + in_turns(WAYS, slow(OTHERS))
)
def test_tokens_are_those_of_peft_alone_and_in_one_batch(way, family, adapted, pool, monkeypatch):
    """Two prompts by three adapters and none through two slots, also with cached prefixes."""
    model, drafter = adapted(family), WildDrafter()
    drafter.know_texts([tokens + model.expected[name] for name, (tokens, _) in model.requests.items()])
    monkeypatch.setattr("engine.parts.speculation.make.NgramDrafter", lambda shortest, longest: drafter)
    draft_always(monkeypatch)
    with pool.engine(config(model.folder, **WAYS[way])) as core:
        together = ask(core, model.requests)
        assert not together.errors
        assert together.tokens == model.expected
        for name in ("none 0", "one 0", "three 1"):
            assert ask(core, {name: model.requests[name]}).tokens[name] == model.expected[name]
        stats = core.stats()
    if family == "llama":  # others have windows, states or other blocks
        assert (stats.preemptions > 0) == (way == "chunks and preemption")
    drafts = stats.record(SpecDecodeStats)
    assert (drafts is not None and drafts.num_accepted_tokens > 0) == (way == "drafts")


@pytest.mark.parametrize(
    ("family", "dtype"),
    few(1, pairwise(["llama"], ["bfloat16", "float32"])) + in_turns(slow(NATIVE[1:]), ["float32", "bfloat16"]),
)
def test_bits_do_not_depend_on_the_company(family, dtype, adapted, tmp_path, opened):
    """Alone, beside 15 other adapters, and in an engine without any."""
    model = adapted(family)
    adapters = [scaled(tmp_path / str(i), model.adapters[i % 3], 8 + i) for i in range(16)]
    opened.append(core := build_engine(config(model.folder, dtype=dtype, max_loras=16, max_num_seqs=32)))
    opened.append(plain := build_engine(config(model.folder, dtype=dtype, enable_lora=False, max_num_seqs=32)))
    requests = {str(i): (prompt(12, i % 3), lora) for i, lora in enumerate([*adapters, None, None])}
    together, others = ask(core, requests), [name for name, (_, lora) in requests.items() if lora is None]
    for name in ("0", "7", "15"):
        alone = ask(core, {name: requests[name]})
        assert alone.tokens[name] == together.tokens[name] and alone.logprobs[name] == together.logprobs[name]
    without = ask(plain, {name: requests[name] for name in others})
    assert without.logprobs == {name: together.logprobs[name] for name in others}
    assert len({tuple(logprob.logprob for logprob in answer) for answer in together.logprobs.values()}) == 18


def scaled(target: Path, lora: ModelAdapter, alpha: int) -> ModelAdapter:
    """Write the same weights with another factor."""
    shutil.copytree(lora.path, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": alpha}))
    return named(target)


def named(folder: Path) -> ModelAdapter:
    return ModelAdapter(folder.name, str(folder), open_adapter(folder).digest)


def test_blocks_are_shared_by_requests_of_one_adapter_only(adapted, opened):
    model = adapted("llama")
    one, two, _ = model.adapters
    opened.append(core := build_engine(config(model.folder)))
    tokens = prompt(21)
    assert [ask(core, {"x": (tokens, lora)}).cached["x"] for lora in (None, one, two, one, None)] == [0, 0, 0, 20, 20]


def test_an_adapter_that_cannot_be_used_ends_its_requests_and_no_others(adapted, tmp_path, opened):
    model = adapted("llama")
    one = model.adapters[0]
    opened.append(core := build_engine(config(model.folder)))
    expected = ask(core, {"good": (prompt(9), one)}).tokens["good"]
    cut = tmp_path / "cut"
    shutil.copytree(one.path, cut)
    (cut / "adapter_model.safetensors").write_bytes((cut / "adapter_model.safetensors").read_bytes()[:-8])
    wrong = ModelAdapter("gone", str(tmp_path / "none"), "0" * 32)
    changed = ModelAdapter("changed", one.path, "1" * 32)
    requests = {"good": (prompt(9), one), "gone": (prompt(9), wrong), "changed": (prompt(9), changed)}
    answers = ask(core, requests | {"cut": (prompt(9), ModelAdapter("cut", str(cut), "2" * 32))})
    assert answers.tokens["good"] == expected and answers.errors.keys() == {"gone", "changed", "cut"}
    assert "adapter 'gone': path must be a folder" in answers.errors["gone"]
    assert "has changed" in answers.errors["changed"] and "whole" in answers.errors["cut"]
    assert ask(core, {"good": (prompt(9), one)}).tokens["good"] == expected


def test_adapters_that_do_not_fit_the_model_are_refused(adapted, tmp_path, opened):
    model = adapted("llama")
    one = model.adapters[0]
    opened.append(core := build_engine(config(model.folder, max_lora_rank=16)))
    with pytest.raises(AdapterError, match=r"with the names .*lm_head"):  # PEFT saves the head itself as well
        make_adapter(tmp_path / "head", model.folder, 1, target_modules=["q_proj", "lm_head"])
    head = tmp_path / "head" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(head).items() if "lora_" in name}, head)
    lost = tmp_path / "lost"
    shutil.copytree(one.path, lost)
    tensors = load_file(lost / "adapter_model.safetensors")
    renamed = {
        name.replace("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"): tensors[name] for name in tensors
    }
    save_file(renamed, lost / "adapter_model.safetensors")
    cases = [
        (make_adapter(tmp_path / "high", model.folder, 1, rank=32), r"r must be at most 16 \(max_lora_rank\), got 32"),
        (named(head.parent), r"adapters of the output head are not supported.*without a matching layer: lm_head"),
        (named(lost), r"got 1 of \d+ without a matching layer: model\.layers\.9\.self_attn\.q_proj"),
        (make_adapter(tmp_path / "other", adapted("phi3").folder, 1), "without a matching layer|of a layer with"),
    ]
    for lora, message in cases:
        with pytest.raises(AdapterError, match=message):
            core.mail[AdapterCourier].check_adapter(lora)


def test_an_engine_without_adapters_refuses_them(adapted, opened):
    model = adapted("llama")
    one = model.adapters[0]
    opened.append(core := build_engine(config(model.folder, enable_lora=False)))
    with pytest.raises(AdapterError, match="this engine has no adapters"):
        core.add(GenerateRequest(request_id="x", prompt=[3, 4]).asking(one))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize(
    "method",
    with_slow(["ngram", "noisy_model", "mtp", "hybrid_mtp", "eagle3"], ["noisy_model", "mtp", "hybrid_mtp", "eagle3"]),
)
def test_drafts_change_no_token_of_an_adapter(method, drafters, tmp_path, opened, monkeypatch):
    draft_always(monkeypatch)
    folder, options = drafters[method]
    one, two = (make_adapter(tmp_path / str(seed), folder, seed) for seed in (1, 2))
    requests = {"a": (prompt(6) * 3, one), "b": (prompt(6) * 3, two), "c": (prompt(6) * 3, None)}
    opened.append(plain := build_engine(config(folder)))
    opened.append(core := build_engine(config(folder, speculative_config=SpeculativeConfig(**options))))
    assert ask(core, requests, max_tokens=24).tokens == ask(plain, requests, max_tokens=24).tokens
    assert core.stats().record(SpecDecodeStats).num_draft_tokens > 0


def test_grammars_and_adapters_of_one_batch_do_not_meet(tmp_path, opened):
    """Each answer obeys its grammar, and is the one that it is alone."""
    folder = make_model(tmp_path / "model", "llama", tokenizer=True)
    one, two = (make_adapter(tmp_path / str(seed), folder, seed) for seed in (1, 2))
    opened.append(core := build_engine(config(folder)))
    tokenizer = ChatTokenizer.from_folder(folder)
    form = {"structured_outputs": StructuredOutputsParams(regex="[a-z]{12}"), "ignore_eos": False, "max_tokens": 20}
    requests = {str(i): (prompt(9), lora) for i, lora in enumerate((None, one, two))}
    together = ask(core, requests, **form).tokens
    assert together == {name: ask(core, {name: request}, **form).tokens[name] for name, request in requests.items()}
    texts = {tokenizer.decode(tokens) for tokens in together.values()}
    assert len(texts) == 3 and all(re.fullmatch("[a-z]{12}", text) for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    each_once(
        with_slow(["llama", "qwen3_moe"], ["qwen3_moe"]),
        [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}],
    ),
)
def test_ranks_give_the_bits_of_one(family, layout, adapted, pool):
    model, answers = adapted(family), []
    for options in ({}, layout):
        with pool.engine(config(model.folder, determinism="strict", **options)) as core:
            answers.append(ask(core, model.requests))
    one, two = answers
    assert not two.errors and one.tokens == two.tokens == model.expected and one.logprobs == two.logprobs


def test_options_that_do_not_go_together_are_refused(tmp_path):
    for options, key in (({"max_lora_rank": 257}, "max_lora_rank"), ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu")):
        with pytest.raises(ConfigError, match=key):
            EngineConfig(enable_lora=True, **options)
