"""Speculative decoding: drafters guess tokens, and the model verifies several of them in one step."""
