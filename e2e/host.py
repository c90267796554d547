"""Pods that run the machine's own Python environment: no image of kLLM has to be built for a test.

The engine's environment takes gigabytes, so its folders are mounted (hostPath, read-only) onto an image that is all but
empty. The paths inside are the machine's: a virtual environment works nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import images

IMAGE = "kllm/host:e2e"
_REPOSITORY = Path(__file__).parents[1]
_SYSTEM = Path("/usr")
_SYSTEM_PARTS = ("/bin", "/sbin", "/lib", "/lib64")
_ALTERNATIVES = Path("/etc/alternatives")
_LIBRARIES = Path("/etc/ld.so.cache")


@dataclass(frozen=True)
class HostEnvironment:
    """What of the machine a pod sees.

    Attributes:
        python: The virtual environment's interpreter.
        folders: Folders that are mounted at the paths that they have here.
        prefix: Where the node has the machine's folders; empty where it has the same ones.
    """

    python: Path
    folders: tuple[Path, ...]
    prefix: str = ""

    @classmethod
    def of_this_process(cls, *, prefix: str = "") -> HostEnvironment:
        """The environment that runs this code, and this repository."""
        parts = (Path(part) for part in _SYSTEM_PARTS)
        wanted = (
            _SYSTEM,
            *(part for part in parts if part.is_dir() and not part.is_symlink()),
            Path(sys.base_prefix).resolve(),
            Path(sys.prefix),
            _REPOSITORY,
        )
        return cls(python=Path(sys.prefix) / "bin" / "python", folders=_outermost(wanted), prefix=prefix)

    def command(self, module: str) -> list[str]:
        """The command line that runs a module of the environment."""
        return [str(self.python), "-m", module]

    def volumes(self) -> list[dict[str, Any]]:
        """A pod's volumes."""
        return [
            {"name": f"host-{number}", "hostPath": {"path": f"{self.prefix}{folder}", "type": "Directory"}}
            for number, folder in enumerate(self.folders)
        ]

    def mounts(self) -> list[dict[str, Any]]:
        """Where a container mounts them."""
        return [
            {"name": f"host-{number}", "mountPath": str(folder), "readOnly": True}
            for number, folder in enumerate(self.folders)
        ]


def write_image(path: Path) -> None:
    """Write the image that the folders are mounted onto.

    It has the links and the linker's cache by which the machine finds what is in /usr, and no users: as an image of a
    vendor that knows nothing of user 65532.
    """
    links = {part: str(Path(part).readlink()) for part in _SYSTEM_PARTS if Path(part).is_symlink()}
    if _ALTERNATIVES.is_dir():
        links |= {str(link): str(link.readlink()) for link in _ALTERNATIVES.iterdir() if link.is_symlink()}
    files = {str(_LIBRARIES): _LIBRARIES.read_bytes()} if _LIBRARIES.exists() else {}
    images.write(path, IMAGE, files=files, folders=["/tmp", "/proc", "/sys", "/dev"], links=links)  # noqa: S108


def _outermost(folders: Sequence[Path]) -> tuple[Path, ...]:
    """The folders that lie in none of the others."""
    unique = dict.fromkeys(folders)
    return tuple(
        folder for folder in unique if not any(folder.is_relative_to(other) for other in unique if other != folder)
    )
