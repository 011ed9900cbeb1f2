"""What an engine tells the processes that use it, and takes from them."""
