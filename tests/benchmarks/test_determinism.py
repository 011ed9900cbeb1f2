from __future__ import annotations

import json

import pytest
import torch

from benchmarks import determinism
from benchmarks.command import run
from benchmarks.determinism import Comparison
from engine.model.ops import linear
from tests.models import make_model


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """Its MLP is wide enough for oneDNN to sum a row that is alone in another order."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2}
    return str(make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, **sizes))


def differing(**arguments) -> list[Comparison]:
    comparisons = determinism.measure(dtypes=["bfloat16"], num_threads=1, **arguments).comparisons
    assert all(one.requests for one in comparisons)
    return [one for one in comparisons if one.other_tokens or one.other_logprobs or one.largest_difference]


@pytest.mark.slow
def test_the_bundled_model_answers_in_bfloat16_the_same_however_requests_are_computed():
    assert not differing(output_len=48, ranks=(), modes=["off"])


@pytest.mark.slow
def test_so_does_a_model_with_a_wide_mlp(wide):
    assert not differing(model=wide, requests=16, output_len=24, ranks=(), modes=["off"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_several_ranks_it_does_if_determinism_is_strict(wide):
    found = differing(model=wide, requests=16, output_len=24, ranks=(2, 4))
    scenarios = {"on 2 ranks", "on 4 ranks", "prompt on 2 other ranks", "prompt on 4 other ranks"}
    assert {(one.scenario, one.determinism) for one in found} == {(scenario, "off") for scenario in scenarios}


@pytest.mark.slow
def test_the_command_counts_what_differs(wide, monkeypatch, capsys):
    """Here whatever is computed token by token does, by a thousandth."""

    def one_row_is_larger(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear.multiply(x, weight, bias) * (1.001 if len(x) == 1 else 1.0)

    monkeypatch.setattr(linear, "linear", one_row_is_larger)
    arguments = ["--model", wide, "--dtypes", "float32", "--requests", "16", "--output-len", "4", "--threads", "1"]
    with pytest.raises(SystemExit) as ended:
        run(determinism.main, [*arguments, "--modes", "off", "--ranks", "", "--json"])
    assert ended.value.code == 0
    comparisons = [Comparison(**comparison) for comparison in json.loads(capsys.readouterr().out)["comparisons"]]
    assert comparisons[0].scenario == "alone" and comparisons[0].other_logprobs == 0
    (batched,) = (comparison for comparison in comparisons if comparison.scenario == "in batches of 16")
    assert (batched.dtype, batched.determinism, batched.requests, batched.other_logprobs) == ("float32", "off", 16, 16)
    assert batched.other_tokens <= 16 and batched.largest_difference > 0
