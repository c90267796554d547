"""Reads image files back."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path


def written(path: Path) -> tuple[dict, dict, tarfile.TarFile]:
    """The manifest, the settings and the layer of an image file."""
    with tarfile.open(path) as image:
        content = {member.name: image.extractfile(member).read() for member in image.getmembers()}
    (manifest,) = json.loads(content["manifest.json"])
    (layer,) = manifest["Layers"]
    settings = json.loads(content[manifest["Config"]])
    assert settings["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(content[layer]).hexdigest()}"]
    return manifest, settings, tarfile.open(fileobj=io.BytesIO(content[layer]))
