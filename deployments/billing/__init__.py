"""What requests cost their clients."""
