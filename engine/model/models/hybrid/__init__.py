"""Families with recurrent layers."""
