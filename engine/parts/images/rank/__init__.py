"""Images on a rank."""
