"""Values of the option `quantization`: methods that round an unquantized checkpoint as it is loaded."""

from __future__ import annotations

from typing import Literal, get_args

Method = Literal["fp8", "int8", "int4"]
METHODS: tuple[Method, ...] = get_args(Method)
