"""Methods by which an unquantized checkpoint can be rounded as it is loaded: values of the option `quantization`."""

from __future__ import annotations

from typing import Literal, get_args

Method = Literal["fp8", "int8", "int4"]
METHODS: tuple[Method, ...] = get_args(Method)
