"""Python and its packages: what Manta needs, and what makes it faster or able to do more."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from cluster.cli.check.finding import Finding
from deployments import ray_compat

DISTRIBUTION = "manta-serve"
LEAST_PYTHON = (3, 11)
EXTRAS = {"gpu": "FlashAttention on GPUs", "nixl": "KV between pools over RDMA", "otel": "traces"}


def check_packages() -> Iterator[Finding]:
    yield check_python(sys.version_info[:3])
    wanted = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    yield check_needed([r for r in wanted if is_for(r, "")])
    for name in ("torch", "ray"):
        yield Finding("ok", name, version(name))
    for extra, use in EXTRAS.items():
        yield check_extra(extra, use, [r for r in wanted if is_for(r, extra) and not is_for(r, "")])
    if sys.platform == "linux":
        yield check_haproxy()
    yield check_kernel_cache()


def is_for(requirement: Requirement, extra: str) -> bool:
    """extra: empty for what is needed without any."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def check_python(found: tuple[int, ...]) -> Finding:
    told = f"{'.'.join(map(str, found))} on {platform.system()} {platform.machine()}"
    if found < LEAST_PYTHON:
        return Finding("problem", "Python", told, "Manta needs 3.11 or newer")
    return Finding("ok", "Python", told)


def check_needed(needed: Iterable[Requirement]) -> Finding:
    wrong = [told for told in map(mismatch, needed) if told]
    if wrong:
        return Finding("problem", "packages", "; ".join(wrong), f"Install again: pip install {DISTRIBUTION}")
    return Finding("ok", "packages", "all that are needed are there")


def check_extra(extra: str, use: str, needed: Iterable[Requirement]) -> Finding:
    wrong = [told for told in map(mismatch, needed) if told]
    if wrong:
        advice = f"Only for {use}: pip install '{DISTRIBUTION}[{extra}]'"
        return Finding("ok", f"extra {extra}", "; ".join(wrong), advice)
    return Finding("ok", f"extra {extra}", f"installed ({use})")


def mismatch(needed: Requirement) -> str | None:
    """What is wrong with an installed package; None if nothing is."""
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return f"{needed.name} is not installed"
    if needed.specifier and not needed.specifier.contains(found, prereleases=True):
        return f"{needed.name} is {found}, {needed.specifier} is needed"
    return None


def check_haproxy() -> Finding:
    try:
        return Finding("ok", "HAProxy", ray_compat.haproxy_binary())
    except FileNotFoundError as error:
        advice = "Or serve through Serve's slower proxy, with RAY_SERVE_ENABLE_HA_PROXY=0 in the environment"
        return Finding("problem", "HAProxy", str(error), advice)


def check_kernel_cache() -> Finding:
    """Numba keeps compiled kernels in the first of these folders that it may write to."""
    if importlib.util.find_spec("numba") is None:
        return Finding("warning", "kernels", "Numba is not installed", "A CPU computes several times slower without")
    own, spec = os.environ.get("NUMBA_CACHE_DIR"), importlib.util.find_spec("engine.model.ops.cpu.kernel")
    assert spec is not None and spec.origin is not None
    for folder in [Path(own)] if own else [Path(spec.origin).parent, Path.home() / ".cache"]:
        if writable(folder):
            return Finding("ok", "kernels", f"compiled once, and kept below {folder}")
    advice = "Set NUMBA_CACHE_DIR to a folder that can be written to, or each start takes longer"
    return Finding("warning", "kernels", "compiled kernels cannot be kept", advice)


def writable(folder: Path) -> bool:
    """By writing, since root may be told that it can where the file system cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
