"""Folders that are complete or absent: built beside, checksummed, renamed into place, and checked on each use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from kllm_core.models.exceptions import DiskFullError, ModelError

Progress = Callable[[str], None]

MANIFEST = "kllm-manifest.json"
_LOCK_POLL_SECONDS = 0.1
_READ_BYTES = 1 << 22


class _Entry(msgspec.Struct, frozen=True):
    size: int
    xxh3: str


class _Manifest(msgspec.Struct, frozen=True):
    recipe: str
    files: dict[str, _Entry]


def ensure_folder(
    folder: Path,
    *,
    recipe: str,
    build: Callable[[Path], None],
    needed_bytes: int,
    progress: Progress,
    lock_timeout_seconds: float = 600.0,
) -> Path:
    """Return `folder`, built if it is absent, damaged, or made by another recipe.

    Args:
        folder: where it lives.
        recipe: name and version of what `build` makes.
        build: writes all files into the folder it is given.
        needed_bytes: size of the result; without that much free space nothing is written.
        progress: told what takes time.
        lock_timeout_seconds: how long another process may take that builds the same.

    Raises:
        ModelError: no space, no permission, or the other process took too long.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress, lock_timeout_seconds):
            problem = find_damage(folder, recipe)
            if problem is None:
                return folder
            if folder.exists():
                progress(f"{folder.name}: {problem}; making it again")
            _require_space(folder.parent, needed_bytes, freed=_size(folder))
            _build(folder, recipe, build)
    except OSError as error:
        where = f"model cache {folder.parent}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFullError(f"{where}; free some space or choose another --cache") from error
        raise ModelError(f"{where}; check its permissions") from error
    return folder


def find_damage(folder: Path, recipe: str) -> str | None:
    """What is wrong with a folder, or None when each byte is as it was built."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
    except FileNotFoundError:
        return "it is not complete"
    except msgspec.DecodeError:
        return "its manifest is damaged"
    if manifest.recipe != recipe:
        return "it was made by another version"
    for name, expected in manifest.files.items():
        try:
            entry = _entry(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        if entry != expected:
            return f"{name} is damaged"
    return None


def _build(folder: Path, recipe: str, build: Callable[[Path], None]) -> None:
    for left_over in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        build(partial)
        files = {path.name: _entry(path) for path in sorted(partial.iterdir())}
        manifest = {"recipe": recipe, "files": {name: msgspec.structs.asdict(entry) for name, entry in files.items()}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress, timeout_seconds: float) -> Iterator[None]:
    """Hold the folder's lock; the kernel lets go of it when its holder dies."""
    deadline = time.monotonic() + timeout_seconds
    descriptor = os.open(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"{folder}: another process has been preparing it for {timeout_seconds:.0f} s"
                    raise ModelError(f"{message}; end that process and try again") from None
                if not told:
                    progress(f"{folder.name}: waiting for another process that prepares it")
                    told = True
                time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _require_space(directory: Path, needed_bytes: int, *, freed: int) -> None:
    free = shutil.disk_usage(directory).free
    # The old folder is removed only after the new one is complete, so that its bytes do not count as free.
    if free < needed_bytes:
        message = f"{directory} has {free / 2**20:.0f} MiB free, {needed_bytes / 2**20:.0f} MiB are needed"
        old = f" (removing the old folder there frees {freed / 2**20:.0f} MiB)" if freed else ""
        raise DiskFullError(f"{message}{old}; free some space or choose another --cache")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def _entry(path: Path) -> _Entry:
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return _Entry(size, digest.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
