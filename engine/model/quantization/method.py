"""The ways to round an unquantized checkpoint while it is loaded, by name: values of the option `quantization`."""

from __future__ import annotations

from typing import Literal, get_args

Method = Literal["fp8", "int8", "int4"]
METHODS: tuple[Method, ...] = get_args(Method)
