"""How an ingress knows the HAProxy of its own server from that of another one of the machine."""

SERVER_VARIABLE = "MANTA_SERVER"  # a random id, in the environment of both
SERVER_HEADER = "x-manta-server"  # which HAProxy adds to every request
