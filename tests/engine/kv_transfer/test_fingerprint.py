from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.errors import ModelFolderError
from engine.kv_transfer.fingerprint import fingerprint
from engine.model.config import ModelConfig
from tests.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


def of(
    folder: Path, dtype: torch.dtype = torch.float32, block_size: int = 16, *,
    kv_dtype: torch.dtype = torch.float32, quantization: str | None = None,
) -> str:  # fmt: skip
    return fingerprint(ModelConfig.from_folder(folder, quantization), folder, dtype, kv_dtype, block_size)


def test_a_copy_of_a_model_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    assert of(copy) == of(model)


def test_it_says_what_the_kv_looks_like(model: Path) -> None:
    found = of(model, torch.bfloat16, 32, kv_dtype=torch.float8_e4m3fn)
    assert found.startswith(
        "kv=2 dtype=bfloat16 kv_dtype=float8_e4m3fn block_size=32 determinism=None layers=3 groups=3x2x2x16 rope="
    )


def differing(a: str, b: str) -> set[str]:
    """Names of the fields that are not equal."""
    return {x.partition("=")[0] for x, y in zip(a.split(), b.split(), strict=True) if x != y}


def test_engines_that_compute_with_other_kernels_have_another_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(model)
    monkeypatch.setattr("engine.kv_transfer.fingerprint.numerics_digest", lambda: "another kernel")
    assert differing(before, of(model).replace("another kernel", "other")) == {"numerics"}


def test_dtype_and_block_size_are_part_of_it(model: Path) -> None:
    assert differing(of(model), of(model, dtype=torch.bfloat16)) == {"dtype"}
    assert differing(of(model), of(model, block_size=8)) == {"block_size"}
    assert differing(of(model), of(model, kv_dtype=torch.float8_e4m3fn)) == {"kv_dtype"}


def test_weights_that_are_rounded_when_loaded_change_it(model: Path) -> None:
    assert differing(of(model), of(model, quantization="fp8")) == {"config"}


def flip_a_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def train_anew(folder: Path) -> None:
    make_model(folder, "qwen3", seed=1)


def turn_rope(folder: Path) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["rope_parameters"]["rope_theta"] = 12345.0
    file.write_text(json.dumps(fields))


def change_norm(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (flip_a_weight, {"weights"}),
        (train_anew, {"weights"}),
        (turn_rope, {"rope", "config"}),
        (change_norm, {"config"}),
    ],
)
def test_whatever_changes_the_kv_changes_it(
    model: Path, tmp_path: Path, change: Callable[[Path], None], fields: set[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    change(other)
    assert differing(of(model), of(other)) == fields


def test_a_file_that_cannot_be_read_is_named(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelFolderError, match=r"cannot read model\.safetensors"):
        of(other)
