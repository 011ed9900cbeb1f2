from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.fingerprint import PARTS, differing_parts
from cluster.model_info import model_info
from engine.source_digest import as_in_a_checkout
from tests.models import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


def fingerprint(model: Path, **keys: object) -> str:
    found = model_info(ModelSection(name="m", model=str(model), **keys), IngressSection()).fingerprint
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"name": "other"}, []),
        ({"engine": {"max_num_seqs": 3}}, []),
        ({"engine": {"dtype": "bfloat16"}}, ["options"]),
        ({"engine": {"block_size": 32}}, ["options"]),
        ({"engine": {"structured_outputs_config": {"disable_additional_properties": True}}}, []),
        ({"engine": {"structured_outputs_config": {"disable_additional_properties": False}}}, ["options"]),
        ({"decode": {"num_gpus": 1}}, ["options"]),
        ({"prefill": {"engine": {"tensor_parallel_size": 2}}}, ["options"]),
        ({"override_generation_config": {"temperature": 0.5}}, ["options"]),
    ],
)
def test_options_count_if_they_may_change_an_answer(model, keys, parts):
    other = model_info(ModelSection(**{"name": "m", "model": str(model), **keys}), IngressSection()).fingerprint
    assert differing_parts(fingerprint(model), other or "") == parts


def test_the_number_of_ranks_counts_unless_bits_do_not_depend_on_it(model):
    def of(ranks: int, determinism: str | None) -> str:
        return fingerprint(model, engine={"tensor_parallel_size": ranks, "determinism": determinism})

    assert differing_parts(of(1, None), of(2, None)) == ["options"]
    assert of(1, "strict") == of(2, "strict")


@pytest.mark.parametrize(
    ("file", "part"),
    [("config.json", "weights"), ("tokenizer.json", "tokenizer"), ("chat_template.jinja", "tokenizer")],
)
def test_files_of_a_model_count_in_their_part(model, tmp_path, file, part):
    other = shutil.copytree(model, tmp_path / "other")
    with (other / file).open("a") as changed:
        changed.write("\n")
    assert differing_parts(fingerprint(model), fingerprint(other)) == [part]


def test_a_fingerprint_of_another_form_differs_in_all_parts(model):
    assert differing_parts("fp_0123456789abcdef", fingerprint(model)) == [*PARTS]


def test_a_file_counts_alike_in_a_checkout_and_in_a_wheel(tmp_path):
    below_one_name = runpy.run_path(str(ROOT / "tools" / "wheel" / "build_backend.py"))["below_one_name"]
    changed = 0
    for file in (ROOT / "engine").rglob("*.py"):
        (installed := tmp_path / "installed.py").write_text(below_one_name(file.read_text()))
        changed += installed.read_bytes() != file.read_bytes()
        assert as_in_a_checkout(installed) == as_in_a_checkout(file), file
    assert changed > 100
