"""Shared by the routes of all APIs over HTTP."""
