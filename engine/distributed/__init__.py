"""Communication between processes: collectives of the ranks that share a model, plan broadcast, ZMQ sockets."""
