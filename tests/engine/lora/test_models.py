"""Logits with adapters on all linear layers against PEFT's, of models of every kind: beside each other and beside rows
without one in one step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import LLM, LoRARequest
from engine.lora.adapter_files import open_adapter
from engine.lora.errors import AdapterError
from engine.lora.model_adapters import ModelAdapters
from engine.model.checkpoint import cache
from engine.model.checkpoint.resolve import resolve
from engine.model.fixed_order import in_fixed_order
from engine.model.low_rank import row_table
from engine.model.shard import ShardPlan
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.images import PromptImages
from tests.batches import ByHand, load_by_hand
from tests.deltas import deltas_of
from tests.engine.core.test_images import GREEDY, engine, prompts
from tests.engine.lora.adapted_models import ALL, BACKEND
from tests.engine.lora.peft_adapters import make_adapter, with_adapter
from tests.engine.model.quantization.checkpoints import FORMATS, quantize_folder
from tests.engine.model.quantization.test_checkpoints import SHAPE
from tests.gguf_files import WIDE, write_gguf
from tests.models import make_model, with_slow
from tests.pooling_models import EMBEDDINGS, TEXTS, Reference, make
from tests.products import few
from tests.ranks import make_plans, on_all
from tests.transformers_models import make_transformers_model
from tests.vision_models import expected_tokens, make_vision_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
WITH_EXPERTS = "OlmoeForCausalLM"
WHOLE = "GPTBigCodeForCausalLM"  # which transformers does not split, and whose random model repeats one token
STRICT = ("qwen3_moe", "gpt_oss", "mixtral", "minicpm3")
QUICK = ("llama", "qwen3_moe", *BACKEND[:1])


def with_adapters(folder: Path, adapters: list[ModelAdapter], tp: Any = None, **options: Any) -> ByHand:
    """The model of a folder, of which the first sequence has no adapter, and sequence i the one before i."""
    hand = load_by_hand(folder, tp, **options)
    slots = ModelAdapters(hand.model, len(adapters), 16, 256, torch.device("cpu"))
    for slot, lora in enumerate(adapters):
        slots.write(slot, slots.factors(open_adapter(lora.path)))
    rows = np.repeat(np.arange(-1, len(adapters), dtype=np.int32), len(PROMPT))
    slots.rows.begin(torch.from_numpy(row_table(rows, slots.rows.tile_rows)))
    return hand


def step(hand: ByHand, count: int) -> list[torch.Tensor]:
    return list(hand.step(dict.fromkeys(range(count + 1), PROMPT)).split(len(PROMPT)))


@torch.inference_mode()
def expected(folder: Path, adapters: list[ModelAdapter], merged: bool = False) -> list[torch.Tensor]:
    answers = []
    for lora in (None, *adapters):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if lora is not None:
            model = with_adapter(model, lora.path)
            model = model.merge_and_unload() if merged else model
        answers.append(model(torch.tensor([PROMPT])).logits[0])
    return answers


def check(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance / 10)
    changes = [(logits - wanted[0]).abs().max().item() for logits in wanted[1:]]
    assert min(changes) > 0.05, "the adapters do nothing"


def two_adapters(root: Path, folder: Path, **config: Any) -> list[ModelAdapter]:
    config = {"target_modules": "all-linear"} | config
    return [make_adapter(root / str(seed), folder, seed, **config) for seed in (1, 2)]


@pytest.mark.parametrize("family", with_slow([*ALL, WHOLE], {*ALL, WHOLE} - set(QUICK)))
def test_logits_are_those_of_peft_with_adapters_on_all_linear_layers_also_of_two_ranks(family, adapted):
    model = adapted(family)
    found, wanted = step(with_adapters(model.folder, model.adapters), 3), expected(model.folder, model.adapters)
    check(found, wanted, 2e-4)
    check(found, expected(model.folder, model.adapters, merged=True), 2e-4)
    if family != WHOLE:
        ranks = make_plans(2)
        parts = [with_adapters(model.folder, model.adapters, tp) for tp in ranks]
        for found in on_all(ranks, lambda rank: step(parts[rank], 3)):
            check(found, wanted, 2e-4)


@pytest.mark.parametrize("form", ["each", "swapped", "down"])
def test_experts_are_read_in_the_forms_that_other_trainers_write(form, tmp_path):
    """Expert by expert as with transformers 4, with A and B exchanged as in older versions of PEFT, and the second
    projection alone."""
    folder = make_model(tmp_path / "model", "qwen3_moe")
    parameters = ["mlp.experts.down_proj"] if form == "down" else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    (lora, other) = two_adapters(tmp_path, folder, target_modules=[], target_parameters=parameters)
    wanted = expected(folder, [lora, other])
    for name in (lora.path, other.path):
        file = Path(name) / "adapter_model.safetensors"
        tensors = load_file(file)
        without_version(Path(name))
        save_file(tensors if form == "down" else rewritten(tensors, form), file)
    check(step(with_adapters(folder, [lora, other]), 2), wanted)
    ranks = make_plans(2, expert_parallel=True)
    parts = [with_adapters(folder, [lora, other], rank) for rank in ranks]
    for found in on_all(ranks, lambda rank: step(parts[rank], 2)):
        check(found, wanted)


def test_an_adapter_of_an_expert_that_the_model_lacks_is_refused_by_every_rank(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3_moe")
    lora, _ = two_adapters(tmp_path, folder, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    file = Path(lora.path) / "adapter_model.safetensors"
    tensors = {name.replace("experts.5.", "experts.6."): x for name, x in rewritten(load_file(file), "each").items()}
    save_file(tensors, file)
    for rank in make_plans(2, expert_parallel=True):
        with pytest.raises(AdapterError, match="without a matching layer"):
            with_adapters(folder, [lora], rank)


def without_version(folder: Path) -> None:
    """Let an adapter be one of a version of PEFT that did not write which one it is."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_version": None}))


def rewritten(tensors: dict[str, torch.Tensor], form: str, experts: int = 6) -> dict[str, torch.Tensor]:
    found = {}
    for name in [name for name in tensors if ".lora_A." in name]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        each_a, each_b = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
        if form == "swapped":  # of each expert, A is B transposed, and B is A transposed
            own_a, own_b = each_b.mT.flatten(0, 1), each_a.mT.permute(1, 2, 0).flatten(1)
            found |= {name: own_a, name.replace("lora_A", "lora_B"): own_b}
            continue
        parts = ("gate_proj", "up_proj") if "base_layer" in name else ("down_proj",)
        for i, (own_a, own_b) in enumerate(zip(each_a, each_b, strict=True)):
            for part, rows in zip(parts, own_b.chunk(len(parts)), strict=True):
                for letter, factor in (("A", own_a), ("B", rows)):
                    own = f"experts.{i}.{part}.lora_{letter}"
                    found[name.replace("experts.base_layer.lora_A", own).replace("experts.lora_A", own)] = factor
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def test_experts_of_sizes_that_do_not_tell_the_parameter_and_of_other_models_are_refused(tmp_path):
    ambiguous = make_model(tmp_path / "ambiguous", "qwen3_moe", moe_intermediate_size=48)
    other = make_model(tmp_path / "other", "qwen3_moe")
    lora = make_adapter(tmp_path / "a", ambiguous, 1, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    with_adapters(ambiguous, [lora])  # PEFT's version tells which way round it is
    without_version(Path(lora.path))
    with pytest.raises(AdapterError, match="fit more than one"):
        with_adapters(ambiguous, [lora])
    with pytest.raises(AdapterError, match="must be of 6 experts with 48 inputs and 64 outputs, or 32 and 48"):
        with_adapters(other, [lora])


def test_experts_of_transformers_code_whose_weights_are_stored_transposed(tmp_path):
    folder = make_transformers_model(tmp_path / "model", "Llama4ForCausalLM", num_experts_per_tok=1)
    experts = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    adapters = two_adapters(tmp_path, folder, **experts)
    check(step(with_adapters(folder, adapters), 2), expected(folder, adapters))


def test_the_experts_of_gpt_oss_may_have_one_size_for_both_parameters(tmp_path):
    """As in the models that were published, whose down_proj is square."""
    folder = make_model(tmp_path / "model", "gpt_oss", hidden_size=48, intermediate_size=48)
    adapters = two_adapters(tmp_path, folder, target_modules=[], target_parameters=["experts.down_proj"])
    check(step(with_adapters(folder, adapters), 2), expected(folder, adapters))


@pytest.mark.parametrize("family", with_slow(STRICT, STRICT[1:]))
@pytest.mark.parametrize("spread", few(1, [True, False]))
def test_adapters_of_experts_and_heads_have_the_same_bits_with_any_number_of_ranks_if_sums_have_a_fixed_order(
    family, spread, adapted
):
    model, ranks = adapted(family), make_plans(2, expert_parallel=spread, fixed_order=True)
    alone = step(with_adapters(model.folder, model.adapters, in_fixed_order(ShardPlan())), len(model.adapters))
    check(alone, expected(model.folder, model.adapters))
    parts = [with_adapters(model.folder, model.adapters, rank) for rank in ranks]
    for found in on_all(ranks, lambda rank: step(parts[rank], len(model.adapters))):
        assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("name", with_slow(["fp8_blocks", "ct_int8", "awq", "gptq"], ["ct_int8", "gptq"]))
def test_adapters_are_added_to_the_products_with_quantized_weights(name, tmp_path):
    source = make_model(tmp_path / "source", "llama", **SHAPE)
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    adapters = two_adapters(tmp_path, source)
    check(step(with_adapters(tmp_path / "model", adapters), 2), expected(tmp_path / "twin", adapters))


@pytest.mark.parametrize("type", with_slow(["Q4_K", "Q8_0"], ["Q8_0"]))
def test_adapters_are_added_to_the_products_with_a_files_packed_weights(type, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    source = make_model(tmp_path / "source", "llama", **WIDE)
    numbers = write_gguf(source, tmp_path / "model.gguf", type)
    adapters = two_adapters(tmp_path, source)
    found = step(with_adapters(resolve(str(tmp_path / "model.gguf")), adapters), 2)
    check(found, expected(numbers, adapters), 5e-4)


def test_quantizing_at_load_leaves_adapters_as_they_are(tmp_path):
    folder = make_model(tmp_path / "model", "llama", **SHAPE)
    adapters = two_adapters(tmp_path, folder)
    found, wanted = step(with_adapters(folder, adapters, quantization="int8"), 2), expected(folder, adapters)
    for own, exact in zip(found, wanted, strict=True):  # as close with an adapter as without
        assert ((own - exact).norm() / exact.norm()).item() < 0.1


@pytest.mark.parametrize("name", with_slow(["qwen3_vl", "mistral3"], ["mistral3"]))
def test_answers_about_images_are_those_of_the_merged_model(name, tmp_path):
    folder = make_vision_model(tmp_path / "model", name)
    auto: Any = transformers.AutoModelForImageTextToText
    lora = make_adapter(
        tmp_path / "lora", folder, 1, auto=auto, target_modules=r".*language_model.*_proj", lora_alpha=16
    )
    merged = with_adapter(auto.from_pretrained(folder, dtype=torch.float32), lora.path)
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    core, wanted = engine(folder, enable_lora=True), prompts(name)
    outputs: dict[str, list[int]] = {}
    for i, prompt in enumerate(wanted):
        for own, adapter in ((f"{i}", None), (f"{i} lora", lora)):
            outputs[own] = []
            request = {"prompt": prompt.tokens, "params": GREEDY}
            core.add(GenerateRequest(request_id=own, **request).asking(PromptImages.of(prompt.images), adapter))
    for delta in deltas_of(core):
        outputs[delta.request_id] += delta.token_ids
    core.close()
    for i, prompt in enumerate(wanted):
        assert outputs[f"{i}"] == expected_tokens(folder, prompt, 8)
        assert outputs[f"{i} lora"] == expected_tokens(tmp_path / "merged", prompt, 8)
    assert outputs["0"] != outputs["0 lora"]


@pytest.mark.parametrize("name", few(1, ["bge", "qwen3_embedding", "gte_modernbert"]))
def test_embeddings_are_those_of_the_merged_model(name, tmp_path):
    kind, folder = EMBEDDINGS[name], make(tmp_path / "model", EMBEDDINGS[name])
    auto: Any = transformers.AutoModel
    linears = "all-linear" if name != "bge" else ["query", "key", "value", "attention.output.dense"]
    lora = make_adapter(tmp_path / "lora", folder, 1, auto=auto, target_modules=linears)
    merged = tmp_path / "merged"
    shutil.copytree(folder, merged)
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with_adapter(model, lora.path).merge_and_unload().save_pretrained(merged)
    options = {
        "block_size": 4,
        "num_gpu_blocks_override": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
    }
    with LLM(folder, dtype="float32", enable_lora=True, **options) as llm:
        texts = [text for text in TEXTS[:4] for _ in range(2)]
        found = llm.embed(texts, lora_request=[None, LoRARequest(lora.name, 1, lora.path)] * 4, use_tqdm=False)
    vectors = [torch.tensor(output.outputs.embedding) for output in found]
    for text, plain, adapted in zip(TEXTS[:4], vectors[::2], vectors[1::2], strict=True):
        torch.testing.assert_close(plain, Reference(folder, kind).embed(text), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(adapted, Reference(merged, kind).embed(text), atol=1e-5, rtol=1e-5)
    assert (vectors[0] - vectors[1]).abs().max() > 0.01


def test_layers_that_transformers_code_computes_itself_are_refused(tmp_path):
    folder = make_transformers_model(tmp_path / "model", WITH_EXPERTS)
    with pytest.raises(AdapterError, match=r"3 of 21 without a matching layer: model\.layers\.[0-2]\.mlp\.gate"):
        with_adapters(folder, two_adapters(tmp_path, folder))
    experts = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    adapters = [make_adapter(tmp_path / f"experts {i}", folder, i, **experts) for i in (1, 2)]
    check(step(with_adapters(folder, adapters), 2), expected(folder, adapters))
