from __future__ import annotations

import re
import time

import pytest

from engine.model.quantization.scheme import parse
from engine.model.quantization.unsupported import UnsupportedScheme

CT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
}
LAYER = "layers.0.mlp.down_proj"


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["{prefix}" + LAYER]},
        {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["{prefix}" + LAYER]},
        {**CT, "ignore": ["{prefix}" + LAYER]},
        {**CT, "ignore": [r"re:{prefix}layers\.0\..*"]},
    ],
    ids=["fp8", "awq", "compressed-tensors", "expression"],
)
def test_a_layer_that_is_left_out_is_found_under_any_name_of_the_model_around_it(config, prefix):
    key = "ignore" if "ignore" in config else "modules_to_not_convert"
    if config[key][0].startswith("re:"):
        if not prefix:
            pytest.skip("an expression is matched from the beginning of a name, as it stands")
        prefix = prefix.replace(".", r"\.")
    scheme = parse({**config, key: [name.format(prefix=prefix) for name in config[key]]})
    assert scheme.format_of([f"model.{LAYER}"]) is None
    assert scheme.format_of([f"model.{LAYER.replace('0', '1')}"]) is not None


NAMES = [f"model.layers.{i}.{part}" for i in (0, 17) for part in ("mlp.gate", "mlp.gate_proj", "self_attn.q_proj")]


@pytest.mark.parametrize(
    "expression",
    [
        ".*gate$", "^.*(gate|q_proj)$", r"model\.layers\.0\..*", ".*self_attn", r"^model\.layers\.1\d", "lm_head",
        r"model\.layers\.(0|3)\.|visual", r".*layers\.\d+\.mlp\.(?:gate|up)_proj$",
    ],
)  # fmt: skip
def test_an_expression_matches_as_with_pythons_re(expression):
    config = parse({**CT, "ignore": [f"re:{expression}"]})
    for name in [*NAMES, "lm_head"]:
        assert config.quantizes(name) == (re.match(expression, name) is None), name


@pytest.mark.parametrize("expression", ["(a+)+b", "((a|a)*)*b", "(.*)*.*.*.*.*.*x", "(((.*)+)+)+x"])
def test_no_expression_takes_long_whatever_the_name(expression):
    started = time.process_time()
    assert parse({**CT, "ignore": [f"re:{expression}"]}).quantizes("a" * 500)
    stars = {"quant_method": "mxfp4", "modules_to_not_convert": ["a*" * 20 + "b"]}
    assert not parse(stars).quantizes("a" * 500)  # only experts are
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("ignore", "limit"),
    [
        (["re:(?!x)a"], "without look-around and with few states"),
        (["re:a|b$"], "without look-around"),
        (["re:("], "without look-around"),
        (["re:" + "a" * 501], "at most 500 characters for each"),
        ([f"re:a{i}.*" for i in range(65)], "at most 64 regular expressions"),
    ],
)
def test_other_expressions_are_refused_by_name(ignore, limit):
    with pytest.raises(UnsupportedScheme) as refused:
        parse({**CT, "ignore": ignore})
    assert refused.value.key == "ignore" and limit in refused.value.limit
