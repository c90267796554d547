"""`kllm-router tokenizer URI --cache DIR`: the files of a model that the router needs, without its weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kllm_core.models import hub
from kllm_core.models.exceptions import ModelError, ModelNotFoundError, ModelUnusableError, WrongAddressError
from kllm_core.models.link import link_folder
from kllm_core.termination import tell_why

_PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Fetch the files, link to them, and print {"event":"tokenizer","path":...}.

    A failure is `REASON: MESSAGE` on standard error and in the container's termination message.

    Returns:
        0, or the exit code of what went wrong; see `kllm_core.models.exceptions`.
    """
    arguments = _parser().parse_args(argv)
    try:
        path = fetch(arguments.uri, arguments.cache)
        if arguments.link is not None:
            link_folder(arguments.link, path)
    except ModelError as error:
        told = f"{error.reason}: {' '.join(str(error).split())}"
        sys.stderr.write(f"kllm-router: {told}\n")
        tell_why(told)
        return error.exit_code
    print(json.dumps({"event": "tokenizer", "path": str(path)}), flush=True)  # noqa: T201  read by programs
    return 0


def fetch(uri: str, cache: Path) -> Path:
    """Make the files available and give their folder.

    Args:
        uri: hf://ORG/NAME[@REVISION], or a folder, which stays where it is.
        cache: where downloads are kept; what is there already is not fetched again.

    Raises:
        ModelError: they cannot be had.
    """
    if uri.startswith("demo://"):
        raise WrongAddressError(f"{uri} is made by the engine: run `kllm-engine model {uri}` instead")
    if "://" not in uri:
        return _usable(Path(uri).expanduser().absolute(), uri)
    if not uri.startswith(hub.SCHEME):
        raise WrongAddressError(f"{uri!r} is neither {hub.SCHEME}ORG/NAME[@REVISION] nor a folder")
    repository = uri.removeprefix(hub.SCHEME)
    return _usable(hub.fetch(repository, cache_dir=cache, patterns=_PATTERNS, progress=_tell_nobody), uri)


def _tell_nobody(_message: str) -> None:
    """These files are there in no time."""


def _usable(folder: Path, uri: str) -> Path:
    """Refuse what the router would refuse later."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"{uri}: there is no such folder")
    for name in ("tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise ModelUnusableError(f"{uri} has no {name}")
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kllm-router tokenizer", description=__doc__, allow_abbrev=False)
    parser.add_argument("uri", metavar="URI", help="hf://ORG/NAME[@REVISION], or a folder")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="where downloads are kept")
    parser.add_argument("--link", type=Path, metavar="PATH", help="symbolic link that shall point to the files")
    return parser
