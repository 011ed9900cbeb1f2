"""Where Ray Serve finds our applications, and where their API listens."""

from __future__ import annotations

BUILDER = "manta:build"  # the import_path of our applications
BUILDERS = (BUILDER, f"{__package__}.app:build")  # the same function by its own name
HOST, PORT = "127.0.0.1", 8000  # default address of the API
