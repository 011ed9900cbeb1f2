"""Pipeline stages in the scheduler."""
