"""Model families: which class computes each architecture, and how its config.json is read."""
