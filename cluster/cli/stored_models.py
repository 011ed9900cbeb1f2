"""`manta pull --list` and `manta pull --remove NAME`: the models that are kept on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import InvalidParameter
from engine.model.checkpoint import cache, smollm2
from engine.user_folder import user_folder

MAX_NAMED = 10  # in an error


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine, or what was made of a GGUF file to serve it."""

    name: str
    """What `manta serve` calls it; for what was made of a GGUF file, the file's path."""
    kind: str
    bytes: int
    """Size of what `remove` deletes."""
    remove: Callable[[], None] = field(repr=False)


def stored_models() -> list[StoredModel]:
    """Return what is kept on this machine, by name. A folder or a GGUF file elsewhere is the user's own, and not
    listed."""
    return sorted((*_fetched(), *_made(), *_of_the_hub()), key=lambda model: model.name)


def remove_model(name: str) -> int:
    """Delete what is kept under a name. Returns the bytes that this frees. Raises InvalidParameter that names what is
    there."""
    models = stored_models()
    found = [model for model in models if model.name == name]
    if not found:
        names = [model.name for model in models]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        there = f"one of {', '.join(names[:MAX_NAMED])}{more}" if names else "a model that is kept here; there is none"
        raise InvalidParameter("--remove", name, there)
    for model in found:
        model.remove()
    return sum(model.bytes for model in found)


def _fetched() -> Iterator[StoredModel]:
    file = smollm2.path()
    if file.is_file():
        yield StoredModel(smollm2.NAME, "fetched from the package index", file.stat().st_size, file.unlink)


def _made() -> Iterator[StoredModel]:
    """Yield the folders with the metadata of GGUF files."""
    folder = user_folder(str(cache.CACHE))
    for made in sorted(folder.iterdir()) if folder.is_dir() else ():
        links = [file for file in made.iterdir() if file.is_symlink()] if made.is_dir() else []
        if not links:
            continue  # one that is being made
        own = [file for file in made.rglob("*") if file.is_file() and not file.is_symlink()]
        name = smollm2.NAME if links[0].readlink() == smollm2.path() else str(min(link.readlink() for link in links))
        yield StoredModel(name, "metadata of a GGUF file", sum(file.stat().st_size for file in own), _deletes(made))


def _deletes(folder: Path) -> Callable[[], None]:
    return lambda: shutil.rmtree(folder)


def _of_the_hub() -> Iterator[StoredModel]:
    """Yield the models in the cache of the Hugging Face Hub, which other programs use too."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # slow to import

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repo in found.repos:
        if repo.repo_type == "model":
            revisions = found.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
            yield StoredModel(repo.repo_id, "from the Hugging Face Hub", repo.size_on_disk, revisions.execute)
