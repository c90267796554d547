"""A folder in memory where the workers of one router leave what they tell each other.

Each writes files of its own, whole or not at all, and reads those of the others.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")  # noqa: S108  a folder of our own is made in it, which only we can read
_MOST_BYTES = 1024 * 1024


class Folder:
    """One worker's view of it.

    Args:
        path: of the folder.
        name: of this worker; no other has or had it.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name

    def write(self, kind: str, data: bytes) -> None:
        """Leave something, in place of what was left before.

        Raises:
            OSError: the folder is gone, or memory is full.
        """
        new = self._path / f".{self._name}.{kind}"
        new.write_bytes(data)
        new.replace(self._path / f"{self._name}.{kind}")

    def others(self, kind: str) -> dict[str, bytes]:
        """What the other workers left, by their names; those that have ended are among them until it is removed."""
        found: dict[str, bytes] = {}
        for path in self._path.glob(f"*.{kind}"):
            if path.stem == self._name or path.name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                found[path.stem] = file.read(_MOST_BYTES)
        return found

    def remove(self, kind: str) -> None:
        """Take back what was left."""
        (self._path / f"{self._name}.{kind}").unlink(missing_ok=True)


def new_folder() -> Path:
    """A folder in memory, which only this user can read."""
    parent = _MEMORY if _is_writable(_MEMORY) else None
    return Path(tempfile.mkdtemp(prefix="kllm-router-", dir=parent))


def _is_writable(path: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False
