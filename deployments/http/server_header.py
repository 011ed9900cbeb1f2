"""The headers that HAProxy adds to every request, replacing those of the same names."""

SERVER_VARIABLE = "MANTA_SERVER"  # a random id, in the environment of HAProxy and of ingresses
SERVER_HEADER = "x-manta-server"  # the same id: an ingress tells by it another server's HAProxy on the same machine
NODE_HEADER = "x-manta-node"  # Ray's id of HAProxy's node, since any ingress of the cluster may be asked
