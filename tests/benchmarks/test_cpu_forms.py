import pytest

from benchmarks import cpu_forms
from tests.gguf_files import write_gguf
from tests.models import make_model

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 256}


@pytest.mark.slow
def test_a_file_is_measured_as_it_is_and_in_each_form_made_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))  # whose cache gets the file's metadata
    file = tmp_path / "model.gguf"
    write_gguf(make_model(tmp_path / "model", "llama", **SHAPE), file, "Q4_1")
    report = cpu_forms.measure(str(file), rounds=1)
    assert [form.form for form in report.forms] == ["bfloat16", "GGUF, kept packed", "int8", "int4"]
    for form in report.forms:
        assert len(form.tokens_per_s) == len(cpu_forms.STREAMS)
        assert min(*form.tokens_per_s, form.first_token_ms, form.memory_gib) > 0
    cpu_forms.show_report(report)
    assert "kept packed" in " ".join(capsys.readouterr().out.split())
