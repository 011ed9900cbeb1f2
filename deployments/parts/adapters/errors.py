"""Errors of loading and unloading adapters, with vLLM's messages."""

from __future__ import annotations

from engine.errors import RequestError


class AdapterAlreadyLoaded(RequestError):
    def __init__(self, name: str):
        Exception.__init__(self, name)
        self.message = (
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        )
        self.param = "lora_name"


class AdapterNotLoaded(RequestError):
    status, type = 404, "not_found_error"

    def __init__(self, name: str):
        Exception.__init__(self, name)
        self.message, self.param = f"The lora adapter '{name}' cannot be found.", "lora_name"
