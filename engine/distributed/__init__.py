"""Ranks that share a model, and the messages between processes: collectives, plan broadcast, ZMQ sockets."""
