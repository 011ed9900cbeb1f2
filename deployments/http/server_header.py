"""The header by which an ingress knows its own server's HAProxy from another's on the same machine."""

SERVER_VARIABLE = "MANTA_SERVER"  # a random id, in the environment of both
SERVER_HEADER = "x-manta-server"  # which HAProxy adds to every request
