"""Tapes of schedulers and routers."""
