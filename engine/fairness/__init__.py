"""Fairness between clients: chooses whose request runs next, and whose grammar is compiled next."""
