"""Holds, as clients ask for them."""
