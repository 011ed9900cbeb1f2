"""Turns between clients: whose request runs next, and whose grammar is compiled next."""
