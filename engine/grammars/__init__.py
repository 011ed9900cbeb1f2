"""Schemas and grammars of users, in the forms that llguidance enforces."""
