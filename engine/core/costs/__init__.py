"""What steps cost, and to whom that is charged."""
