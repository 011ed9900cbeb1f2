from __future__ import annotations

import pytest

from benchmarks import quantization
from benchmarks.quantization import show_report


@pytest.mark.slow
def test_a_rounded_model_knows_the_answers_of_the_model_as_it_is_and_is_shown_beside_it(capsys):
    report = quantization.measure(words=2, rounds=1)
    plain, int8, int4 = report.methods
    assert plain.same_tokens == plain.same_answers == 1
    for method in (plain, int8, int4):
        assert method.token_cpu_ms > 0
        assert method.perplexity is not None and 1 <= method.perplexity < 1.1
    show_report(report)
    assert "prompt cpu ms / as it is" in capsys.readouterr().out
