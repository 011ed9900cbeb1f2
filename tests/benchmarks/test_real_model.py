from contextlib import nullcontext

import pytest

from benchmarks.real_model import offline
from tests.gguf_files import write_gguf
from tests.models import make_model


@pytest.mark.parametrize("is_gguf", [False, True], ids=["checkpoint", "gguf"])
def test_each_form_is_made_of_the_checkpoint_or_of_the_numbers_of_the_file(is_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # whose cache gets the file's metadata
    model = make_model(tmp_path / "model", "llama", tokenizer=True)
    if is_gguf:
        write_gguf(model, model := tmp_path / "model.gguf", "Q4_1")
    served = []
    monkeypatch.setattr(offline, "LLM", lambda name, **options: nullcontext(served.append(name)))
    monkeypatch.setattr(offline, "perplexity", lambda llm, tokens: (2.0 + len(served), 0.5))
    rows = {row[0]: row for row in offline.perplexities(str(model), 24)}
    of_file = [name for form, name in zip(rows, served, strict=True) if form.startswith("GGUF")]
    assert of_file == [str(model)] * 2 * is_gguf
    assert served.count(str(model)) == (2 if is_gguf else 5), "bfloat16, int8 and int4 are no copies of a checkpoint"
    assert rows["float32"][2] == "+0.00%" and rows["bfloat16"][2] == "+33.33%"
