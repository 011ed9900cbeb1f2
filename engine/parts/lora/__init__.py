"""Adapters of one scheduler: which of them has a slot on the device."""
