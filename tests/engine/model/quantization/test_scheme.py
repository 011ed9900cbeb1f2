from __future__ import annotations

import pytest

from engine.model.quantization.scheme import parse

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
