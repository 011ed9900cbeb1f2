"""Patterns of PEFT's configurations, against PEFT's own matching where that ends."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from peft.utils.other import get_pattern_key

from engine.lora.errors import AdapterError
from engine.lora.module_patterns import ModulePatterns

MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 17)
    for part in ("self_attn.q_proj", "self_attn.my_q_proj", "mlp.experts.3.up_proj", "mlp.experts.gate_up_proj")
]


@pytest.mark.parametrize(
    "keys",
    [
        ["q_proj"],
        ["self_attn.q_proj", "q_proj"],
        ["model.layers.1.self_attn.q_proj", "up_proj"],
        ["^model.layers.0.self_attn.q_proj", "^layers.1.*", "q_proj$"],
        [r".*\.layers\.(0|17)\..*", r"layers\.\d+\.mlp\..*", "proj"],
        [r".*\.mlp\.experts\.gate_up_proj", "up_proj"],
        [r"layers\.[0-9]{1,2}\.(self_attn|mlp)\.[^.]*", "q_proj"],
        [r"(?:layers).1.self_attn.(my_)?q_proj|up_proj", r"\w+_proj"],
    ],
)
def test_the_first_key_that_matches_decides_as_in_peft(keys):
    patterns = ModulePatterns("sql", "alpha_pattern", {key: i for i, key in enumerate(keys)})
    for module in MODULES:
        found = get_pattern_key(keys, module)
        assert patterns.number(module) == (keys.index(found) if found in keys else None), module


@pytest.mark.parametrize(
    "key", ["(a+)+b", "((a|a)*)*b", "(.*)*.*.*.*.*.*x", r"([\w.]{1,1000}){1,1000}x", "(.?){500}a{501}", "(((.*)+)+)+x"]
)
def test_no_expression_takes_long_whatever_the_name(key):
    started = time.process_time()
    with suppress(AdapterError):  # too many states
        assert ModulePatterns("sql", "alpha_pattern", {key: 1}).number("a" * 500) is None
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["("], "alpha_pattern must be of names of modules, or of regular expressions"),
        (["(?=a)b"], "look-around"),
        ([r"(a)\1"], "alpha_pattern must be of names"),
        (["^a|b"], "look-around"),
        (["a" * 501], "of patterns with at most 500 characters"),
        ([f"a{i}.*" for i in range(65)], "at most 100000 names of modules, and 64 regular expressions, got 0 and 65"),
        ([f"a{i}" for i in range(100_001)], "got 100001 and 0"),
    ],
)
def test_other_keys_are_refused_by_name(keys, message):
    with pytest.raises(AdapterError) as caught:
        ModulePatterns("sql", "alpha_pattern", dict.fromkeys(keys, 1))
    assert message in str(caught.value)


def test_many_expressions_need_few_modules():
    patterns = ModulePatterns("sql", "alpha_pattern", {f"a{i}.*": 1 for i in range(64)})
    patterns.check_modules(3000)
    with pytest.raises(AdapterError, match="at most 4 regular expressions for 50000 modules, got 64 of them"):
        patterns.check_modules(50_000)
