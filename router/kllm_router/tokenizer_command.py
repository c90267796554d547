"""`kllm-router tokenizer URI --cache DIR`: the files of a model that the router needs, without its weights."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_PATTERNS = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
]  # fmt: skip
_CODES = {
    "Failed": 1, "WrongAddress": 2, "NotFound": 3, "Gated": 3, "HubUnreachable": 4, "DiskFull": 5, "Unusable": 6,
}  # fmt: skip
_HUB_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
TERMINATION_LOG = Path("/dev/termination-log")
"""What a container writes there, the kubelet shows as the reason of its end."""


class TokenizerError(Exception):
    """The files cannot be had.

    Args:
        reason: one of `_CODES`.
        message: for people.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def code(self) -> int:
        """Exit code."""
        return _CODES[self.reason]


def run(argv: Sequence[str]) -> int:
    """Fetch the files, link to them, and print {"event":"tokenizer","path":...}; give the exit code.

    0 done, 2 wrong arguments, 3 not there or not open to us, 4 no hub, 5 disk full, 6 not of use, 1 anything else.
    A failure is one sentence on standard error, and where there is one in the container's termination message.
    """
    arguments = _parser().parse_args(argv)
    try:
        path = fetch(arguments.uri, arguments.cache)
        if arguments.link is not None:
            link(arguments.link, path)
    except TokenizerError as error:
        _tell(f"{error.reason}: {error}")
        return error.code
    print(json.dumps({"event": "tokenizer", "path": str(path)}), flush=True)  # noqa: T201  read by programs
    return 0


def fetch(uri: str, cache: Path) -> Path:
    """Make the files available and give their folder.

    Args:
        uri: hf://ORG/NAME[@REVISION], or a folder, which stays where it is.
        cache: where downloads are kept; what is there already is not fetched again.

    Raises:
        TokenizerError: they cannot be had.
    """
    if uri.startswith("demo://"):
        raise TokenizerError("WrongAddress", f"{uri} is made by the engine: run `kllm-engine model {uri}` instead")
    if "://" not in uri:
        return _usable(Path(uri).expanduser().absolute(), uri)
    address = _HUB_ADDRESS.fullmatch(uri)
    if address is None:
        raise TokenizerError("WrongAddress", f"{uri!r} is neither hf://ORG/NAME[@REVISION] nor a folder")
    return _usable(_download(uri, address[1], address[2], cache), uri)


def link(path: Path, target: Path) -> None:
    """Let a symbolic link point to a folder, in one step.

    Raises:
        TokenizerError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        part.symlink_to(target)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise _local(f"--link {path}", error) from error


def _download(uri: str, repository: str, revision: str | None, cache: Path) -> Path:
    # Takes a while to import, and only this needs it.
    from httpx import HTTPError  # noqa: PLC0415  what huggingface_hub calls with
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=_PATTERNS))
    except HFValidationError as error:
        raise TokenizerError("WrongAddress", f"{uri} is no address of a model repository") from error
    except GatedRepoError as error:
        raise TokenizerError("Gated", f"{uri} is gated: accept its terms and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise TokenizerError("NotFound", f"{uri}: there is no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise TokenizerError("NotFound", f"{uri} does not exist, or needs HF_TOKEN to be seen") from error
    except LocalEntryNotFoundError as error:
        raise _refused(uri, error.__cause__ or error) from error
    except (HTTPError, OSError) as error:
        raise _refused(uri, error) from error


def _refused(uri: str, error: BaseException) -> TokenizerError:
    """What a failed call or write comes to."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return _local(str(error.filename), error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403}:
        return TokenizerError("Gated", f"{uri}: the hub answered {status}: check HF_TOKEN and its rights")
    if status == 404:
        return TokenizerError("NotFound", f"{uri} does not exist at this hub (HF_ENDPOINT)")
    why = f"the hub answered {status}" if status else str(error).partition("\n")[0] or type(error).__name__
    return TokenizerError("HubUnreachable", f"{uri} could not be downloaded: {why} (check HF_ENDPOINT and the network)")


def _usable(folder: Path, uri: str) -> Path:
    """Refuse what the router would refuse later."""
    if not folder.is_dir():
        raise TokenizerError("NotFound", f"{uri}: there is no such folder")
    for name in ("tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise TokenizerError("Unusable", f"{uri} has no {name}")
    return folder


def _local(what: str, error: OSError) -> TokenizerError:
    """A file of ours that cannot be written."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    return TokenizerError("DiskFull" if full else "Failed", f"{what}: {error.strerror or error}")


def _tell(text: str) -> None:
    sys.stderr.write(f"kllm-router: {text}\n")
    if TERMINATION_LOG.is_file():
        try:
            TERMINATION_LOG.write_text(text)
        except OSError:
            return  # standard error has it too


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kllm-router tokenizer", description=__doc__, allow_abbrev=False)
    parser.add_argument("uri", metavar="URI", help="hf://ORG/NAME[@REVISION], or a folder")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="where downloads are kept")
    parser.add_argument("--link", type=Path, metavar="PATH", help="symbolic link that shall point to the files")
    return parser
