"""The folder that stands for a GGUF file."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import ModelFolderError
from engine.model.checkpoint import cache
from engine.model.checkpoint import resolve as resolving
from engine.model.checkpoint.folder import eos_token_ids
from engine.model.checkpoint.identity import identity_of
from engine.model.checkpoint.resolve import resolve
from engine.model.checkpoint.sampling_defaults import default_sampling
from engine.model.config import ModelConfig
from engine.text.chat_tokenizer import ChatTokenizer
from tests.gguf_files import write_gguf
from tests.models import make_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path) -> Path:
    return make_model(tmp_path / "source", "llama")


def write(source: Path, name: str = "model.gguf", type: str = "F16", **metadata: object) -> Path:
    file = source.parent / name
    write_gguf(source, file, type, **metadata)
    return file


def test_what_was_made_of_a_file_that_is_gone_goes_as_the_next_is_made(source, cached):
    kept, gone = write(source, "kept.gguf"), write(source, "gone.gguf")
    made = [resolve(str(file)) for file in (kept, gone)]
    gone.unlink()
    new = resolve(str(write(source, "new.gguf")))
    assert set(cached.iterdir()) == {made[0], new}


def test_a_file_has_template_special_tokens_ends_and_sampling_from_its_metadata(source):
    metadata = {
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.chat_template.tool_use": "for tools",
        "tokenizer.ggml.eot_token_id": 5,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 7,
    }
    made = resolve(str(write(source, **metadata)))
    tokenizer = ChatTokenizer.from_folder(made)
    assert tokenizer.render_chat_template([{"role": "user", "content": "ab"}]) == "abc"  # the token of id 2
    assert tokenizer.template_for([{}]) == "for tools"
    assert eos_token_ids(made) == {2, 5}
    assert default_sampling(made) == {"temperature": 0.5, "top_k": 7}
    assert ModelConfig.from_folder(made).dtype == "float16"


def test_a_folder_with_one_file_is_that_file_and_with_two_models_is_refused(source, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    file = write(source)
    os.link(file, alone / "a.gguf")
    assert resolve(str(alone)) == resolve(str(alone / "a.gguf")) != resolve(str(file))
    os.link(file, alone / "b.gguf")
    with pytest.raises(ModelFolderError, match=r"has 2 models, name one: a\.gguf, b\.gguf"):
        resolve(str(alone))


def test_a_file_in_the_hub_is_named_by_its_name_or_its_quantization(source, monkeypatch):
    (hub := source.parent / "hub").mkdir()
    os.link(write(source), hub / "tiny-Q8_0.gguf")
    os.link(write(source), hub / "tiny-F16.gguf")
    asked = []
    monkeypatch.setattr(resolving, "_download", lambda *args: asked.append(args[:2]) or hub)
    assert resolve("org/tiny@v1:tiny-F16.gguf") == resolve("org/tiny:F16")
    assert asked == [("org/tiny", "v1"), ("org/tiny", None)]
    with pytest.raises(ModelFolderError, match="org/tiny:Q4_0': has no such file"):
        resolve("org/tiny:Q4_0")


def test_parts_of_a_model_are_read_together(source, tmp_path):
    whole = write(source)
    reader = gguf.GGUFReader(whole)
    halves = [reader.tensors[:5], reader.tensors[5:]]
    for i, tensors in enumerate(halves):
        writer = gguf.GGUFWriter(tmp_path / f"part-0000{i + 1}-of-00002.gguf", "llama")
        for field in list(reader.fields.values())[4:] if i == 0 else []:
            writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:2])
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    made = resolve(str(tmp_path / "part-00002-of-00002.gguf"))
    index = json.loads((made / "gguf_tensors.json").read_text())
    assert {entry["file"] for entry in index.values()} == {f"part-0000{i}-of-00002.gguf" for i in (1, 2)}
    assert index.keys() == json.loads((resolve(str(whole)) / "gguf_tensors.json").read_text()).keys()


def test_what_is_made_is_made_once_and_again_when_the_file_changes(source, cached):
    file = write(source)
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: resolve(str(file)), range(4)))
    assert len(made) == 1 and len(list(cached.iterdir())) == 1
    identity = identity_of(made.pop())
    write(make_model(source.parent / "other", "llama", seed=1), file.name)
    assert identity_of(resolve(str(file))) != identity


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "mamba"}, "general.architecture = 'mamba' is not supported: must be one of llama"),
        ({"llama.rope.scaling.type": "su"}, "llama.rope.scaling.type = 'su' is not supported: must be none"),
        ({"llama.attention.clamp_kqv": 1.0}, "llama.attention.clamp_kqv = 1.0 is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8 is not supported: must be 16"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "head_count_kv = .* must be the same for all layers"),
        ({"tokenizer.ggml.pre": "superbpe"}, "tokenizer.ggml.pre = 'superbpe' is not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(source, cached, metadata, named):
    with pytest.raises(ModelFolderError, match=named):
        resolve(str(write(source, **metadata)))
    assert not list(cached.iterdir())


def test_types_and_tensors_that_are_not_known_are_refused_by_name(source, tmp_path):
    for name, type, named in (
        ("blk.0.attn_q.weight", gguf.GGMLQuantizationType.TQ2_0, "type TQ2_0 are not supported: must be one of F32"),
        ("blk.0.ssm_a", gguf.GGMLQuantizationType.F32, r"tensors blk\.0\.ssm_a are not known in a LlamaForCausalLM"),
    ):
        file = tmp_path / f"{type.name}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        for key, value in {"block_count": 1, "attention.head_count": 1}.items():
            writer.add_uint32(f"llama.{key}", value)
        data = np.zeros((1, 66), np.uint8) if type != gguf.GGMLQuantizationType.F32 else np.zeros(4, np.float32)
        writer.add_tensor(name, data, raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelFolderError, match=named):
            resolve(str(file))


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"nothing at all, but long enough to look at")
    with pytest.raises(ModelFolderError, match=r"model\.gguf'.*model\.gguf is no GGUF file"):
        resolve(str(tmp_path / "model.gguf"))
