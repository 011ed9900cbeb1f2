"""Reads the `quantization_config` of config.json: which linear layers are quantized, and in which format.

A key that would change the output and is not supported is an error, never ignored. Formats are imported only as layers
are built: they need torch, and some processes read schemes without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.linear_pattern import LinearPattern, PatternError
from engine.model.quantization.method import Method
from engine.model.quantization.unsupported import UnsupportedScheme
from engine.model.tensor_names import canonical_name

if TYPE_CHECKING:
    from engine.model.quantization.format import WeightFormat
    from engine.model.quantization.online import Online

Fields = dict[str, Any]
GGUF_VOCABULARY = ("lm_head", "model.embed_tokens")
MAX_EXPRESSIONS = 64
MAX_EXPRESSION = 500  # characters
# The beginning of a regular expression for layers inside a multimodal model; see canonical_name.
WRAPPED = re.compile(r"^\^?(model\\?\.language_model|language_model\\?\.model)\\?\.")


@dataclass(frozen=True, slots=True)
class LazyFormat:
    """A format that is not imported yet: its name, as `module.name` in this folder, and its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()

    def make(self) -> Any:
        module, _, name = self.name.rpartition(".")
        return getattr(import_module(f"{__package__}.{module}"), name)(*self.arguments)


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of linear layers whose names match `pattern`; None if they are not quantized."""

    pattern: str
    format: LazyFormat | None
    key: str = ""
    """The key of `quantization_config` whose file wrote the pattern as a regular expression; empty for our own."""

    def matches(self, name: str) -> bool:
        if not self.key:
            return re.match(self.pattern, name) is not None
        try:
            return _linear(self.pattern).matches(name)
        except PatternError as error:
            raise _refused(self.key, self.pattern, error) from None


@dataclass(frozen=True, slots=True)
class Scheme:
    """The formats of all linear layers of one checkpoint."""

    method: str
    """The checkpoint's `quant_method`, or the option `quantization`."""
    rules: tuple[Rule, ...]
    """The first rule that matches a layer's name applies."""
    head: LazyFormat | None = None
    """The format to which the language model's head is rounded as it is loaded; None if the head is not rounded."""

    def format_of(self, names: list[str]) -> WeightFormat | None:
        """Return the format of layers that are merged into one; None if they are not quantized. names: as in the
        checkpoint (`model.layers.0.mlp.up_proj`).

        If the layers' formats differ in a GGUF file, they are dequantized as they are loaded, and the result is None.
        For other checkpoints, raises UnsupportedScheme.
        """
        first, *others = (self._lazy_format(name) for name in names)
        for name, other in zip(names[1:], others, strict=True):
            if other != first and self.method == "gguf":
                return None
            if other != first:
                raise UnsupportedScheme(
                    "ignore", name, f"quantized like {names[0]}, because both are multiplied as one matrix"
                )
        return None if first is None else first.make()

    def layer_format(self, names: list[str]) -> WeightFormat | None:
        """Return what `format_of` returns. Raises ConfigError where it raises UnsupportedScheme."""
        try:
            return self.format_of(names)
        except UnsupportedScheme as e:
            raise ConfigError(f"quantization_config.{e.key}", e.value, e.limit) from e

    def head_format(self) -> Online | None:
        return None if self.head is None else self.head.make()

    def quantizes(self, name: str) -> bool:
        """Return whether a layer is quantized. Does not import its format."""
        return self._lazy_format(name) is not None

    def _lazy_format(self, name: str) -> LazyFormat | None:
        return next((rule.format for rule in self.rules if rule.matches(name)), None)


def online(method: Method) -> Scheme:
    """Return the scheme of an unquantized checkpoint whose layers are all rounded by `method` as they are loaded. With
    int4 the head gets eight bits: it loses more by rounding than other layers do, and eight bits already save half of
    its memory."""
    head = None if method == "fp8" else LazyFormat("online.Online", ("int8",))
    return Scheme(method, (Rule("", LazyFormat("online.Online", (method,))),), head)


def parse(config: Fields) -> Scheme:
    """Read a `quantization_config`. Raises UnsupportedScheme."""
    method = _one_of(config, "quant_method", tuple(PARSERS), "none")
    return Scheme(method, PARSERS[method](config), _gguf_head(config) if method == "gguf" else None)


def _fp8(config: Fields) -> tuple[Rule, ...]:
    """Read FP8 with scales per block (DeepSeek V3, arXiv:2412.19437, section 3.3; Qwen 3) or per tensor."""
    _one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    _one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = config.get("weight_block_size")
    scale = "weight_scale" if block is None else "weight_scale_inv"
    rows_and_columns = (None, None) if block is None else _block(block, "weight_block_size")
    format = LazyFormat("eight_bit.eight_bit", ("float", rows_and_columns, scale, False, "float"))
    ignored = [name for key in ("modules_to_not_convert", "ignored_layers") for name in config.get(key) or ()]
    # match whole components of a name: `mlp.gate` must not match `mlp.gate_proj`
    rules = [Rule(rf"(.*\.)?{re.escape(canonical_name(name))}($|\.)", None) for name in ("lm_head", *ignored)]
    return (*rules, Rule("", format))


def _awq(config: Fields) -> tuple[Rule, ...]:
    version = config.get("version") or config.get("format") or "gemm"
    _one_of({"version": version}, "version", ("gemm", "GEMM"), version)
    _one_of(config, "zero_point", (True,), True)
    bits, group_size = _one_of(config, "bits", (4,), 4), _group_size(config, "group_size")
    format = LazyFormat("packed_int.AWQ", (bits, group_size))
    # AutoAWQ does not quantize layers that have one of these anywhere in their name
    left_out = ("lm_head", *map(canonical_name, config.get("modules_to_not_convert") or ()))
    rules = [Rule(f".*{re.escape(name)}", None) for name in left_out]
    return (*rules, Rule("", format))


def _gptq(config: Fields) -> tuple[Rule, ...]:
    for key in ("dynamic", "modules_in_block_to_quantize", "lm_head"):
        if config.get(key):
            raise UnsupportedScheme(key, config[key], "left out: all layers except lm_head must be quantized alike")
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    form = _one_of({"checkpoint_format": form}, "checkpoint_format", ("gptq", "gptq_v2"), form)
    bits, group_size = _one_of(config, "bits", (4, 8), None), _group_size(config, "group_size")
    ordered, zero_offset = bool(config.get("desc_act")), 1 if form == "gptq" else 0
    format = LazyFormat("packed_int.GPTQ", (bits, group_size, ordered, zero_offset))
    return Rule("lm_head", None), Rule("", format)


def _mxfp4(config: Fields) -> tuple[Rule, ...]:
    """Read MXFP4, which only experts have. `modules_to_not_convert` has patterns with * for layer numbers."""
    names = config.get("modules_to_not_convert") or ()
    left_out = [_expression("modules_to_not_convert", re.escape(name).replace(r"\*", ".*"), None) for name in names]
    return *_few("modules_to_not_convert", left_out), Rule(r".*\.experts$", LazyFormat("mxfp4.MXFP4"))


def _gguf(config: Fields) -> tuple[Rule, ...]:
    """Read the types of a GGUF file's layers by their names (engine/model/checkpoint/gguf)."""
    types = {name: type for name, type in config["types"].items() if name not in GGUF_VOCABULARY}
    patterns = {
        type: "|".join(rf"{re.escape(name)}$" for name, own in types.items() if own == type)
        for type in sorted(set(types.values()))
    }
    return tuple(Rule(pattern, LazyFormat("ggml.GGML", (type,))) for type, pattern in patterns.items())


def _gguf_head(config: Fields) -> LazyFormat | None:
    """Return the format of the head: eight bits, with one scale for 32 numbers. This also applies to a head that is
    tied to the embedding; the embedding itself is dequantized."""
    head = next((config["types"][name] for name in GGUF_VOCABULARY if name in config["types"]), None)
    return None if head is None else LazyFormat("online.Online", ("int8", 32))


def _compressed_tensors(config: Fields) -> tuple[Rule, ...]:
    _one_of(config, "quantization_status", ("compressed", "frozen"), "compressed")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnsupportedScheme("sparsity_config.format", config["sparsity_config"]["format"], "dense")
    if config.get("transform_config"):
        raise UnsupportedScheme("transform_config", config["transform_config"], "left out")
    rules = [_target(name, None, "ignore") for name in config.get("ignore") or ()]
    for name, group in (config.get("config_groups") or {}).items():
        format = _compressed_group(group, group.get("format") or config.get("format"), f"config_groups.{name}")
        key = f"config_groups.{name}.targets"
        rules += [
            Rule("", format) if target == "Linear" else _target(target, format, key) for target in group["targets"]
        ]
    return _few("ignore", rules)


def _target(target: str, format: LazyFormat | None, key: str) -> Rule:
    """Return the rule of a target: a name, or `re:` and an expression for the beginning of names."""
    if not target.startswith("re:"):
        return Rule(re.escape(canonical_name(target)) + "$", format)
    return _expression(key, WRAPPED.sub(r"model\\.", target.removeprefix("re:")), format)


def _expression(key: str, expression: str, format: LazyFormat | None) -> Rule:
    """Return the rule of an expression for the beginning of names. Raises UnsupportedScheme for one that cannot be
    matched in linear time."""
    if len(expression) > MAX_EXPRESSION:
        raise UnsupportedScheme(key, expression[:MAX_EXPRESSION], f"at most {MAX_EXPRESSION} characters for each")
    inner, end = expression, ".*"
    if not _has_alternatives(expression):  # an anchor would belong to one of them
        inner = expression.removeprefix("^")
        if inner.endswith("$") and not inner.endswith("\\$"):
            inner, end = inner[:-1], ""
    whole = f"({inner}){end}"
    try:
        _linear(whole)
    except PatternError as error:
        raise _refused(key, expression, error) from None
    return Rule(whole, format, key)


def _has_alternatives(expression: str) -> bool:
    """Return whether there is a `|` outside of all parentheses."""
    depth = 0
    for character in re.sub(r"\\.|\[[^\]]*\]", "", expression):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _few(key: str, rules: list[Rule]) -> tuple[Rule, ...]:
    count = sum(bool(rule.key) for rule in rules)
    if count > MAX_EXPRESSIONS:
        raise UnsupportedScheme(key, count, f"at most {MAX_EXPRESSIONS} regular expressions")
    return tuple(rules)


@lru_cache(MAX_EXPRESSIONS)
def _linear(expression: str) -> LinearPattern:
    return LinearPattern(expression)


def _refused(key: str, expression: str, reason: PatternError) -> UnsupportedScheme:
    return UnsupportedScheme(key, expression, f"without look-around and with few states ({reason})")


def _compressed_group(group: Fields, form: str | None, path: str) -> LazyFormat:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if weights is None:
        raise UnsupportedScheme(f"{path}.weights", None, "given")
    if group.get("output_activations"):
        raise UnsupportedScheme(f"{path}.output_activations", group["output_activations"], "left out")
    kinds = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float", "naive-quantized": None}
    form = _one_of({"format": form}, "format", tuple(kinds), None)
    kind = _one_of(weights, "type", ("int", "float") if kinds[form] is None else (kinds[form],), "int", path)
    zeros = not weights.get("symmetric", True)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if form == "pack-quantized":
        if inputs:
            raise UnsupportedScheme(f"{path}.input_activations", inputs, "left out with format pack-quantized")
        _one_of({"strategy": strategy}, "strategy", ("group", "channel"), None, path)
        bits = _one_of(weights, "num_bits", (4, 8), None, path)
        group_size = _group_size(weights, "group_size", path) if strategy == "group" else None
        ordered = weights.get("actorder") in ("group", "dynamic", True)
        return LazyFormat("packed_int.PackQuantized", (bits, group_size, ordered, zeros))
    _one_of(weights, "num_bits", (8,), 8, path)
    activations = None
    if inputs:
        _one_of(inputs, "num_bits", (8,), 8, f"{path}.input_activations")
        _one_of(inputs, "type", (kind,), "int", f"{path}.input_activations")
        _one_of(inputs, "symmetric", (True,), True, f"{path}.input_activations")
        activations = kind
    strategy = _one_of({"strategy": strategy}, "strategy", ("tensor", "channel", "block"), None, path)
    block: tuple[int | None, int | None] = (None if strategy == "tensor" else 1, None)
    if strategy == "block":
        block = _block(weights.get("block_structure"), f"{path}.weights.block_structure")
    return LazyFormat("eight_bit.eight_bit", (kind, block, "weight_scale", zeros, activations))


def _one_of(config: Fields, key: str, allowed: tuple[Any, ...], default: Any, path: str = "") -> Any:
    """Return the value of `key`. Raises UnsupportedScheme if it is not allowed."""
    value = config.get(key, default)
    if value not in allowed:
        limit = " or ".join(map(str, allowed))
        raise UnsupportedScheme(f"{path}.{key}".lstrip("."), value, limit)
    return value


def _block(value: object, key: str) -> tuple[int, int]:
    """Return the rows and columns of a block from a key whose value is a list."""
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):
        raise UnsupportedScheme(key, value, "two positive integers")
    return value[0], value[1]


def _group_size(config: Fields, key: str, path: str = "") -> int | None:
    """Return the number of inputs that share a scale; None if all inputs share one (-1 in the configuration)."""
    value = config.get(key)
    if not isinstance(value, int) or value == 0 or value < -1:
        raise UnsupportedScheme(f"{path}.{key}".lstrip("."), value, "a positive integer, or -1")
    return None if value == -1 else value


PARSERS = {
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4, "gguf": _gguf,
}  # fmt: skip
