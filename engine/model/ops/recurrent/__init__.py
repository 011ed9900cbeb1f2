"""Ops of recurrent layers, which keep a state instead of KV."""
