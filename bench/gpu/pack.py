"""Pack what kLLM needs on a GPU machine that reaches no package registry, into folders that travel one at a time.

    python bench/gpu/pack.py .gpu                  # .gpu/1, .gpu/2, ... of at most 50 MiB each
    bash bench/gpu/unpack.sh .gpu/N                # on the GPU machine, for each folder
    bash bench/gpu/unpack.sh --install             # then: into /tmp/site and /tmp/debs
    source bench/gpu/env.sh                        # before every command there

The wheels are those of requirements.txt, for CPython 3.12 on x86-64 Linux. The machine must have CUDA 13 with nvcc and
the packages that every PyTorch image has (NumPy, NVIDIA's libraries, rich, uvicorn's needs and the like).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER_LIMIT = 50 * 2**20
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 18, 17)
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC),
    "manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux_2_5_x86_64",
    "manylinux1_x86_64",
]  # fmt: skip
DEBIAN = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "librdmacm1", "libnuma1")
# 365 of sglang-kernel's 380 MB, which a Hopper GPU does without when it serves with --attention-backend triton.
LEFT_OUT_OF_KERNEL = ("sgl_kernel/flash_ops", "sgl_kernel/sm100/", "sgl_kernel/infllm_ops", "sgl_kernel/flashmla_ops")


def download(requirement: str, folder: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
        "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none", "-d", str(folder),
        *(part for platform in PLATFORMS for part in ("--platform", platform)),
    ]  # fmt: skip
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{requirement}: {done.stderr.strip().splitlines()[-1]}")


def strip_kernel(wheel: Path) -> None:
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name in source.namelist():
            if not name.startswith(LEFT_OUT_OF_KERNEL):
                target.writestr(name, source.read(name))
    slim.replace(wheel)


def split(wheel: Path) -> list[Path]:
    """The wheel itself, or its parts (NAME.whl.000, ...) where it is over the limit."""
    if wheel.stat().st_size <= FOLDER_LIMIT:
        return [wheel]
    parts = []
    with wheel.open("rb") as source:
        while block := source.read(FOLDER_LIMIT):
            part = wheel.with_name(f"{wheel.name}.{len(parts):03d}")
            part.write_bytes(block)
            parts.append(part)
    wheel.unlink()
    return parts


def folders(files: list[Path]) -> list[list[Path]]:
    """First-fit decreasing."""
    bins: list[tuple[int, list[Path]]] = []
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        size = file.stat().st_size
        for index, (used, members) in enumerate(bins):
            if used + size <= FOLDER_LIMIT:
                members.append(file)
                bins[index] = (used + size, members)
                break
        else:
            bins.append((size, [file]))
    return [members for _, members in bins]


def main() -> None:
    destination = Path(sys.argv[1] if len(sys.argv) > 1 else ".gpu")
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=destination) as name:
        scratch = Path(name)
        for requirement in Path(__file__).with_name("requirements.txt").read_text().split():
            download(requirement, scratch)
        for wheel in scratch.glob("sglang_kernel-*.whl"):
            strip_kernel(wheel)
        for package in DEBIAN:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=scratch, check=True)
        files = [part for wheel in sorted(scratch.glob("*.whl")) for part in split(wheel)]
        files += sorted(scratch.glob("*.deb"))
        for number, members in enumerate(folders(files), start=1):
            folder = destination / str(number)
            folder.mkdir()
            for file in members:
                shutil.move(file, folder / file.name)
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"{folder}: {len(members)} files, {size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
