"""What an engine tells the processes that use it, and takes from them; without the sockets of ../server.py."""
