from __future__ import annotations

import json

import pytest
import torch

from benchmarks import command, determinism
from benchmarks.determinism import Share
from engine.model.ops import linear
from tests.models import make_model


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """Its MLP is wide enough for oneDNN to sum a row that is alone in another order."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2}
    return str(make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, **sizes))


def differing(**arguments) -> list[Share]:
    shares = determinism.measure(dtypes=["bfloat16"], num_threads=1, **arguments).shares
    assert len(shares) == 6
    assert all(share.requests for share in shares)
    return [share for share in shares if share.other_tokens or share.other_logprobs]


@pytest.mark.slow
def test_the_bundled_model_answers_in_bfloat16_the_same_however_requests_are_computed():
    assert not differing(output_len=48)


def test_so_does_a_model_with_a_wide_mlp(wide):
    assert not differing(model=wide, requests=16, output_len=24)


def test_the_command_counts_what_differs(wide, monkeypatch, capsys):
    """Here whatever is computed token by token does, by a thousandth."""

    def one_row_is_larger(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear.multiply(x, weight, bias) * (1.001 if len(x) == 1 else 1.0)

    monkeypatch.setattr(linear, "linear", one_row_is_larger)
    arguments = ["--model", wide, "--dtypes", "float32", "--requests", "16", "--output-len", "4", "--threads", "1"]
    with pytest.raises(SystemExit) as ended:
        command.run(determinism.main, [*arguments, "--json"])
    assert ended.value.code == 0
    batched, *_ = (Share(**share) for share in json.loads(capsys.readouterr().out)["shares"])
    assert (batched.way, batched.dtype, batched.requests) == ("in batches of 16", "float32", 16)
    assert batched.other_tokens <= batched.other_logprobs == 16
