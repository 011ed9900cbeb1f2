"""Units of time and memory in accounts."""

GIB_NS = 2**30 * 1e9


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
