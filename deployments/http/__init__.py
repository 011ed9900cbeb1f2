"""What every route over HTTP shares, whichever API it belongs to."""
