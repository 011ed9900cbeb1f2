"""Triton chooses its interpreter when it is first imported, which transformers does for some of these tests."""

from tests.triton_interpreter import use_interpreter

use_interpreter()
