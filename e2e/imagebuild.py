"""Proves images/operator-router.Dockerfile without a registry: builds it on a base of Debian's packages and runs it.

python -m e2e.imagebuild [FOLDER]     image files for `docker load` or `ctr images import` go into the folder
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster import packages
from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.talk import say

_REPOSITORY = Path(__file__).parents[1]
_DOCKERFILE = _REPOSITORY / "images" / "operator-router.Dockerfile"
_SUITE = "bookworm"
_BASE = f"localhost/kllm-base:{_SUITE}"
_STEP_SECONDS = 1800.0
_IMAGES = {"operator": "kllm-operator", "router": "kllm-router"}
# How this machine's pip reaches its registry.
_WAYS_OUT = (Path("/etc/pip.conf"), Path("/etc/ssl/certs/ca-certificates.crt"))
_CHECK = """
import importlib.util, os, sys
assert os.getuid() == 65532, os.getuid()
heavy = [name for name in ("torch", "sglang") if importlib.util.find_spec(name)]
assert not heavy, f"the image holds {heavy}"
import kllm_operator.main, kllm_router.main
"""


def build(layout: Layout, folder: Path) -> None:
    """Build both images, run them, and write them as files.

    Args:
        layout: Where the builder keeps its layers.
        folder: Where the image files go.

    Raises:
        ClusterError: A step failed.
    """
    if os.geteuid() != 0:
        raise ClusterError("building images needs root: use sudo")
    packages.ensure(packages.IMAGES)
    builder = _builder(layout)
    if (
        subprocess.run([*builder, "inspect", "--type", "image", _BASE], capture_output=True, check=False).returncode
        != 0
    ):
        _make_base(builder)
    for target, program in _IMAGES.items():
        say(f"building the {target}'s image")
        name = f"localhost/kllm/{target}:e2e"
        ways = [word for path in _WAYS_OUT if path.exists() for word in ("--volume", f"{path}:{path}:ro")]
        _step(
            *(*builder, "bud", "--isolation", "chroot", "--layers", "--build-arg", f"BASE={_BASE}", *ways),
            *("--target", target, "--file", str(_DOCKERFILE), "--tag", name, str(_REPOSITORY)),
        )
        _prove(builder, name, program)
        file = folder / f"{target}.tar"
        file.unlink(missing_ok=True)
        _step(*builder, "push", name, f"docker-archive:{file}:docker.io/kllm/{target}:e2e")
        say(f"{target}: {file.stat().st_size / 1e6:.0f} MB in {file}")


def _builder(layout: Layout) -> list[str]:
    layers = layout.cache / "images"
    return ["buildah", "--root", str(layers), "--runroot", str(layers / "run"), "--storage-driver", "overlay"]


def _make_base(builder: Sequence[str]) -> None:
    """Make the base image: the smallest Debian with Python."""
    say("making the base image with debootstrap")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        _step(
            *("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"),
            *(_SUITE, str(root), _mirror()),
        )
        for leftover in ("var/cache/apt", "var/lib/apt/lists", "var/log"):
            shutil.rmtree(root / leftover)
            (root / leftover).mkdir()
        container = _step(*builder, "from", "scratch").strip()
        try:
            _step(*builder, "add", container, str(root), "/")
            _step(*builder, "commit", container, _BASE)
        finally:
            _step(*builder, "rm", container)


def _mirror() -> str:
    """The mirror that apt is set up with."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {_SUITE}", "Identifier: Packages"]
    listed = _step(*asked).split()
    if not listed:
        raise ClusterError(f"apt knows no mirror of Debian {_SUITE}")
    return listed[0]


def _prove(builder: Sequence[str], image: str, program: str) -> None:
    container = _step(*builder, "from", "--pull-never", image).strip()
    try:
        inside = (*builder, "run", "--isolation", "chroot", container, "--")
        _step(*inside, program, "--help")
        _step(*inside, "python3", "-c", _CHECK)
    finally:
        _step(*builder, "rm", container)


def _step(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_SECONDS, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)[:200]} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def main() -> int:
    """Build into the folder of the first argument; 1 if it failed."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _REPOSITORY / "dist" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        build(Layout.of_environment(), folder)
    except (ClusterError, OSError, subprocess.SubprocessError) as error:
        say(str(error))
        return 1
    say(f"images built and run in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
