"""Trains and evaluates Pocket, the bundled model of engine/pocket."""
