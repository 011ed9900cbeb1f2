"""Headers that HAProxy sets on every request, replacing any that the client sent."""

SERVER_VARIABLE = "MANTA_SERVER"  # a random id, in the environment of HAProxy and of ingresses
SERVER_HEADER = "x-manta-server"  # the same id, by which an ingress recognises another server's HAProxy
NODE_HEADER = "x-manta-node"  # Ray's id of HAProxy's node, since any ingress of the cluster may get the request
