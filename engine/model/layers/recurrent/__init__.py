"""Layers that keep a recurrent state in place of KV."""
