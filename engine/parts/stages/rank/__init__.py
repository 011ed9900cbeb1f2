"""Pipeline stages on a rank."""
