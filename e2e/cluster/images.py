"""Images without a registry: tar files that the container runtime imports."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import Layout

BUSYBOX = Path("/bin/busybox")
_IMPORT_SECONDS = 120.0
_FOLDER_MODE = 0o755
_PROGRAM_MODE = 0o755
_TEMPORARY_MODE = 0o1777


def write(
    path: Path,
    reference: str,
    *,
    files: Mapping[str, bytes],
    folders: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
    command: Sequence[str] = ("/bin/sh",),
) -> None:
    """Write an image of one layer as a tar file of the form that `docker save` makes.

    Args:
        path: The file to write.
        reference: The image's name and tag.
        files: Contents of executable files by their absolute path.
        folders: Absolute paths of empty folders, parents included by themselves.
        links: Targets of symbolic links by their absolute path.
        command: What runs unless the pod says otherwise.
    """
    layer = _layer(files, folders, links or {})
    digest = hashlib.sha256(layer).hexdigest()
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    encoded = json.dumps(settings).encode()
    name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{digest}.tar"]}]
    with tarfile.open(path, "w") as image:
        for member, content in (
            (f"{digest}.tar", layer),
            (name, encoded),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            image.addfile(entry, io.BytesIO(content))


def write_busybox(
    path: Path, reference: str, *, folders: Sequence[str] = (), command: Sequence[str] = ("/bin/sh",)
) -> None:
    """Write an image with a shell and the usual small programs.

    Args:
        path: The file to write.
        reference: The image's name and tag.
        folders: Absolute paths of empty folders, such as mount points.
        command: What runs unless the pod says otherwise.
    """
    applets = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True, timeout=_IMPORT_SECONDS)
    write(
        path,
        reference,
        files={"/bin/busybox": BUSYBOX.read_bytes()},
        folders=[*folders, "/tmp"],  # noqa: S108 - a path inside the image
        links={f"/bin/{name}": "busybox" for name in applets.stdout.split() if name != "busybox"},
        command=command,
    )


def load(layout: Layout, path: Path) -> None:
    """Import an image file into the cluster's container runtime.

    Raises:
        ClusterError: The runtime does not take it.
    """
    done = subprocess.run(
        ["ctr", "--address", str(layout.containerd), "--namespace", "k8s.io", "images", "import", str(path)],
        capture_output=True,
        text=True,
        timeout=_IMPORT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"{path.name} cannot be imported: {done.stderr.strip()}")


def _layer(files: Mapping[str, bytes], folders: Sequence[str], links: Mapping[str, str]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as layer:
        for folder in sorted(_with_parents([*folders, *(str(Path(path).parent) for path in (*files, *links))])):
            entry = tarfile.TarInfo(folder.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, _TEMPORARY_MODE if folder == "/tmp" else _FOLDER_MODE  # noqa: S108
            layer.addfile(entry)
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), _PROGRAM_MODE
            layer.addfile(entry, io.BytesIO(content))
        for path, target in sorted(links.items()):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            layer.addfile(entry)
    return written.getvalue()


def _with_parents(folders: Sequence[str]) -> set[str]:
    return {str(path) for folder in folders for path in (Path(folder), *Path(folder).parents) if str(path) != "/"}
