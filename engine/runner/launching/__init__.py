"""Where the steps of a rank are launched."""
