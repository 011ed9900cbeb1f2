"""What sequences have cost, which engines may tell only after their end."""
